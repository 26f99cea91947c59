"""Reading CUDA_VISIBLE_DEVICES as CUDA does."""

import ctypes
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_train.gpu.visible import Visible, allocated_by, mask_for, resolve_mask
from robust_train.model.gpu import GpuInfo
from simulated_nvml import Gpu


def gpu(index, uuid=None, **more):
    uuid = uuid or f"GPU-{index}{index}{index}-x"
    return GpuInfo(uuid, "A100", index, f"00000000:{index:02x}:00.0", 100, 50, 50, **more)


def gpus(count):
    return [gpu(index) for index in range(count)]


def indices(visible):
    return [gpu.index for gpu in visible.gpus]


@pytest.mark.parametrize(
    ("mask", "count", "shown"),
    [
        (None, 3, [0, 1, 2]),
        ("0,1,2,-1,3", 4, [0, 1, 2]),
        ("1,5,0", 2, [1]),
        ("2, +3, -0, 5", 6, [2, 3, 0, 5]),
        ("1gpu2,2ampere", 3, [1, 2]),
        ("4,3,two", 5, [4, 3]),
        ("1,0", 2, [1, 0]),
        ("0,", 2, [0]),
        ("0,,1", 2, [0]),
        ("0,GPU-111", 2, [0]),
        ("1,-1", 2, [1]),
    ],
)
def test_numbers_are_read_as_cuda_reads_them(mask, count, shown):
    visible = resolve_mask(mask, gpus(count))
    assert indices(visible) == shown
    assert not visible.hidden_on_purpose


@pytest.mark.parametrize("mask", ["", " ", "-1", " -1 ", "-1,0", "NoDevFiles", "NoDevFiles,0"])
def test_deliberately_hidden_gpus_mean_cpu_silently(mask):
    assert resolve_mask(mask, gpus(2)) == Visible(hidden_on_purpose=True)


@pytest.mark.parametrize(
    ("mask", "entry", "shown"),
    [
        ("0,1,2,1", "1", []),
        ("0,+0", "+0", []),
        ("0,9,0", "0", []),
        ("one,two,3", "one", []),
        ("0,two,1", "two", [0]),
        ("9", "9", []),
        ("0,9", "9", [0]),
        ("-2", "-2", []),
        ("GPU-nothere", "GPU-nothere", []),
        ("GPU-111,GPU-1", "GPU-1", []),
        ("GPU-111,2", "2", [1]),
        ("GPU-111, GPU-222", " GPU-222", [1]),
        ("GPU-", "GPU-", []),
        ("MIG-nothere", "MIG-nothere", []),
        ("MIG-GPU-111/1/0", "MIG-GPU-111/1/0", []),
        ("0,1,-1,2", "-1", [0, 1]),
    ],
)
def test_mistakenly_hidden_gpus_are_warned_of(mask, entry, shown):
    """The warning has a way out."""
    visible = resolve_mask(mask, gpus(3))
    assert indices(visible) == shown
    assert not visible.hidden_on_purpose
    assert f"CUDA_VISIBLE_DEVICES={mask}: the entry '{entry}'" in visible.warning
    assert "unset the variable" in visible.warning


def test_a_unique_prefix_names_a_gpu():
    """An ambiguous one ends the list."""
    there = [gpu(0, "GPU-9e8d35e3-1"), gpu(1, "GPU-9e8dffff-1"), gpu(2, "GPU-abc")]
    assert indices(resolve_mask("GPU-9e8d35e3", there)) == [0]
    assert indices(resolve_mask("GPU-abc,GPU-9e8df", there)) == [2, 1]
    ambiguous = resolve_mask("GPU-abc,GPU-9e8d,GPU-9e8d3", there)
    assert indices(ambiguous) == [2]
    assert "2 GPUs" in str(ambiguous.warning)


SLICED = [
    gpu(0),
    gpu(1, "MIG-a", parent_uuid="GPU-111-x"),
    gpu(1, "MIG-ab", parent_uuid="GPU-111-x"),
    gpu(2),
]


@pytest.mark.parametrize(
    ("mask", "uuids"),
    [
        (None, ["GPU-000-x", "MIG-a", "MIG-ab", "GPU-222-x"]),
        ("MIG-ab", ["MIG-ab"]),
        ("MIG-ab,MIG-a", ["MIG-ab", "MIG-a"]),
        ("1", ["MIG-a"]),
        ("GPU-111", ["MIG-a"]),
        ("2", ["GPU-222-x"]),
        ("3", []),
        ("MIG-ab,GPU-000-x", ["MIG-ab"]),
        ("MIG-a,MIG-a", []),
        ("MIG-", []),
    ],
)
def test_a_slices_name_has_two_forms(mask, uuids):
    """Its UUID, or the GPU that it is cut from."""
    visible = resolve_mask(mask, SLICED)
    assert [gpu.uuid for gpu in visible.gpus] == uuids


LIBC = ctypes.CDLL(None)
LIBC.strtoul.restype = ctypes.c_ulong
NUMBERS = st.lists(st.integers(-2, 6), min_size=1, max_size=6).map(lambda n: ",".join(map(str, n)))
PREFIXES = st.lists(st.sampled_from(["GPU-0", "GPU-00", "GPU-111-x", "GPU-2", "GPU-", "GPU-9"]))
MASKS = st.one_of(
    st.text(alphabet="0123+-, GPUMIGx", max_size=20),
    NUMBERS,
    PREFIXES.map(",".join),
    st.text(max_size=12),
)


@settings(max_examples=40)
@given(mask=MASKS)
def test_no_mask_shows_what_it_omits(mask):
    there = gpus(4)
    visible = resolve_mask(mask, there)
    uuids = [gpu.uuid for gpu in visible.gpus]
    assert len(set(uuids)) == len(uuids)
    entries = mask.split(",")
    assert len(uuids) <= len(entries)
    for entry, shown in zip(entries, visible.gpus, strict=False):
        if mask.startswith("GPU-"):
            assert shown.uuid.startswith(entry)
        else:
            # the very function that CUDA's reading is modelled on
            assert LIBC.strtoul(entry.encode(), None, 10) == shown.index
    if not uuids:
        # either it was meant, or it is said
        assert visible.hidden_on_purpose != (visible.warning != "")


VISIBLE = """
import json, os
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.visible import visible_gpus
visible = [visible_gpus(read_inventory(), os.environ) for _ in range(3)][-1]
print(json.dumps([[gpu.uuid for gpu in visible.gpus], visible.warning]))
"""


def test_mixed_machines_use_cudas_own_order(cuda_machine_with):
    """GPUs are numbered by it."""
    machine = cuda_machine_with(Gpu("T4"), Gpu("T4"), Gpu("H100"))
    machine.cuda_order = [machine.uuid(2), machine.uuid(0), machine.uuid(1)]
    machine.update(0)
    uuids, warning = machine.python(VISIBLE, CUDA_VISIBLE_DEVICES="0,1")
    assert (uuids, warning) == ([machine.uuid(2), machine.uuid(0)], "")
    assert len(machine.calls("cuInit")) == 1  # asked once, in another process
    assert machine.calls("cuInit")[0][0] != machine.calls("nvmlInit")[0][0]
    assert machine.python(VISIBLE)[0] == machine.cuda_order


def test_an_unhealthy_gpu_keeps_its_number(cuda_machine_with):
    """It loses it only if CUDA does not count that GPU."""
    machine = cuda_machine_with(Gpu(), Gpu(), Gpu())
    machine.cuda_order = [machine.uuid(1), machine.uuid(2)]
    for function in ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo"):
        machine.fail(function, 999, 0)
    assert machine.python(VISIBLE, CUDA_VISIBLE_DEVICES="0")[0] == [machine.uuid(1)]
    machine.fail("cuInit", 100)
    uuids, warning = machine.python(VISIBLE, CUDA_VISIBLE_DEVICES="1,0")
    assert uuids == [machine.uuid(1), machine.uuid(0)], "the ill one, too"
    for words in ("CUDA_VISIBLE_DEVICES=1,0", "PCI order", "cuInit failed with CUDA error 100"):
        assert words in warning


@pytest.mark.parametrize(
    ("models", "environ", "shown"),
    [
        ("T4 H100", {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [0]),
        ("T4 H100", {"CUDA_VISIBLE_DEVICES": "GPU-00000001"}, [1]),
        ("T4 H100", {"CUDA_VISIBLE_DEVICES": ""}, []),
        ("T4 T4", {"CUDA_VISIBLE_DEVICES": "1"}, [1]),
    ],
)
def test_cuda_is_asked_only_if_order_matters(cuda_machine_with, models, environ, shown):
    machine = cuda_machine_with(*map(Gpu, models.split()))
    machine.cuda_order = [machine.uuid(1), machine.uuid(0)]
    machine.update(0)
    assert machine.python(VISIBLE, **environ)[0] == [machine.uuid(number) for number in shown]
    assert machine.calls("cuInit") == []


def test_numbers_name_gpus_if_all_are_known():
    first, second = (GpuInfo(f"GPU-{n}", "A", n, str(n), 1, 1, 0, cuda_index=n) for n in (0, 1))
    assert mask_for((second, first), by_index=True) == "1,0"
    assert mask_for((second, first), by_index=False) == "GPU-1,GPU-0"
    assert mask_for((first, replace(second, cuda_index=None)), by_index=True) == "GPU-0,GPU-1"
    assert mask_for((), by_index=True) == ""


@pytest.mark.parametrize(
    ("environ", "owner"),
    [
        ({}, ""),
        ({"CUDA_VISIBLE_DEVICES": "0"}, ""),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "3"}, "Slurm"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_GPUS": "0,1"}, "Slurm"),
        ({"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "1"}, "Slurm"),
        ({"SLURM_JOB_ID": "7"}, ""),  # GPUs that Slurm knows nothing of
        ({"SLURM_JOB_GPUS": "3"}, ""),
        ({"RAY_RAYLET_PID": "1", "CUDA_VISIBLE_DEVICES": "1"}, "Ray"),
        ({"RAY_RAYLET_PID": "1", "CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"RAY_RAYLET_PID": "1"}, ""),  # a task that asked for no GPU
    ],
)
def test_who_has_allocated_the_gpus(environ, owner):
    assert allocated_by(environ) == owner
