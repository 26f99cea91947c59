"""Tests never touch the GPUs of the machine they run on, unless ``-m gpu`` selects them."""

import os
import subprocess
import sys
import types

import pytest
import torch

import real_gpus
from robust_train.gpu.inventory import NO_DRIVER, read_inventory
from robust_train.gpu.select import idlest, others_on
from robust_train.model.gpu import GpuInfo, GpuProcess
from robust_train.readable import GIB
from simulated_nvml import Gpu, Machine, build_driver
from world import ROOT

HERE = "tests/test_real_gpus.py"
A_JOB = "tests/launcher/test_attempts.py::test_what_a_trainer_prints_is_shown_and_kept"
IN_THIS_PROCESS = "tests/launcher/test_api.py::test_a_missing_key_names_its_reader"
SIMULATED = "tests/gpu/test_gpu_inventory.py::test_a_driver_that_was_reloaded_is_opened_again"


@pytest.mark.skipif("ROBUST_TRAIN_TEST_GPU" in os.environ, reason="a run with -m gpu sees a driver")
def test_a_test_finds_no_driver():
    assert read_inventory().problem == NO_DRIVER
    assert not torch.cuda.is_available()


@pytest.fixture
def driver(tmp_path, nvml_libraries):
    """A machine's own driver, which records who asks it; the second of its GPUs is idle."""
    colleague = [(4242, 20000)]
    gpus = [Gpu(utilization=90, compute=colleague), Gpu(free_mib=9000, reserved_mib=500)]
    return Machine(tmp_path, nvml_libraries, gpus)


def run(driver, *arguments):
    """Run pytest on the machine."""
    libraries = build_driver(driver.folder / "driver", driver)
    shown = {"LD_LIBRARY_PATH": str(libraries), "CUDA_VISIBLE_DEVICES": "0,1"}
    hidden = ("PYTEST_", "ROBUST_TRAIN_TEST_GPU")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    surroundings = {"cwd": ROOT, "env": {**kept, **shown}, "timeout": 120}
    ended = subprocess.run(program, capture_output=True, text=True, **surroundings)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_no_test_asks_the_driver_of_its_machine(driver, workers):
    mine = f"{HERE}::test_a_test_finds_no_driver"
    assert "4 passed" in run(driver, "-n", workers, mine, A_JOB, IN_THIS_PROCESS, SIMULATED)
    assert not (driver.folder / "calls").exists()


@pytest.mark.slow
def test_tests_that_need_a_gpu_get_the_idlest(driver):
    out = run(driver, "-n", "2", "-m", "gpu", f"{HERE}::test_the_mask_shows_the_idlest_gpu")
    assert "1 skipped" in out, "torch cannot use a simulated GPU"
    assert driver.calls("nvmlDeviceGetComputeRunningProcesses")


@pytest.mark.gpu
def test_the_mask_shows_the_idlest_gpu():
    assert torch.cuda.device_count() == 1
    assert f"GPU-{torch.cuda.get_device_properties(0).uuid}" == os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize(
    "selected", ["gpu", "gpu and not slow", "not slow and not gpu", "slow", "gpu or slow", ""]
)
def test_only_pure_gpu_runs_see_the_driver(selected):
    """A pure run has GPU tests alone."""
    config = types.SimpleNamespace(option=types.SimpleNamespace(markexpr=selected))
    assert real_gpus.are_wanted(config) is (selected in ("gpu", "gpu and not slow"))


def gpu(index, free_gib, **figures):
    total, free = 80 * GIB, free_gib * GIB
    named = {"processes": (), **figures}
    return GpuInfo(f"GPU-{index}", "A100", index, f"0{index}", total, free, total - free, **named)


def test_the_idlest_gpu_is_the_freest_unused():
    """No one computes on it."""
    draws = GpuProcess(7, 3 * GIB, computes=False)
    gpus = [
        gpu(0, 79, processes=(GpuProcess(812),)),
        gpu(1, 78, utilization_percent=97),
        gpu(2, 60),
        gpu(3, 79, unusable="needs a reset"),
        gpu(4, 77, processes=(draws,), utilization_percent=20),
        gpu(5, 76),
    ]
    best = idlest([*gpus, gpu(6, 79, processes=None)])
    assert best.index == 6
    assert idlest(gpus).index == 4
    assert idlest(gpus[:4]) is None
    assert others_on(gpus[0], {}) == "pid 812"
    assert "20480 MiB in use" in others_on(gpus[2], {})
