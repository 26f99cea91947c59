"""Hardware that robust-train does not use is named before a job trains on the CPU."""

import logging

import pytest

from robust_train.config.checks import checked
from robust_train.config.composition import complete
from robust_train.gpu import inventory, other_hardware
from robust_train.gpu.other_hardware import accelerator_without_nvml
from robust_train.queue.devices import Devices

TRACES = {
    "etc/nv_tegra_release": "this is a Jetson",
    "dev/nvhost-gpu": "this is a Jetson",
    "dev/nvidia0": "start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    "dev/kfd": "AMD GPUs",
    "sys/class/drm/renderD128/device/vendor": "an Intel GPU, and torch is built for it",
}


@pytest.fixture
def no_nvml(monkeypatch):
    """The tests' own machine hides NVML behind a library that cannot be loaded."""
    monkeypatch.setattr(other_hardware, "ABSENT", "libno_such_library.so.1")


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.usefixtures("no_nvml")
def test_hardware_is_recognised_by_its_driver(tmp_path, monkeypatch, trace):
    monkeypatch.setattr(other_hardware, "torch_built_for", lambda name: "2025.1")
    assert accelerator_without_nvml(tmp_path) is None
    (tmp_path / trace).parent.mkdir(parents=True)
    (tmp_path / trace).write_text("0x8086\n")
    assert TRACES[trace] in accelerator_without_nvml(tmp_path)


@pytest.mark.usefixtures("no_nvml")
def test_an_intel_gpu_needs_its_own_torch(tmp_path):
    """Without a torch for it the GPU is ignored."""
    vendor = tmp_path / "sys/class/drm/renderD128/device/vendor"
    vendor.parent.mkdir(parents=True)
    vendor.write_text("0x8086\n")
    assert accelerator_without_nvml(tmp_path) is None


def test_a_damaged_library_is_no_other_hardware(tmp_path, monkeypatch):
    damaged = tmp_path / "libnvidia-ml.so.1"
    damaged.write_text("not a library")
    monkeypatch.setattr(other_hardware, "ABSENT", str(damaged))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    assert accelerator_without_nvml(tmp_path) is None


def test_jobs_next_to_other_hardware_warn_of_cpu(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(inventory, "accelerator_without_nvml", lambda: "this is a Jetson")
    config = checked(complete({"gpu_queue": False}))
    devices = Devices(config, "job", {}, tmp_path, lambda seconds: None)
    assert devices.acquire() == ()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith("this is a Jetson: training on the CPU, which may take many")
