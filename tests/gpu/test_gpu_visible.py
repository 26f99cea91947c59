"""Reading CUDA_VISIBLE_DEVICES as CUDA does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_train.gpu.visible import (
    Visible,
    allocated_by,
    mask_for,
    names_integers,
    resolve_mask,
    visible_gpus,
)
from robust_train.model.gpu import GpuInfo, Inventory, SkippedGpu
from simulated_nvml import Gpu, Machine

MachineWith = Callable[..., Machine]


def gpu(index: int, uuid: str | None = None, **more: Any) -> GpuInfo:
    values = {
        "uuid": uuid or f"GPU-{index}{index}{index}-x",
        "name": "A100",
        "index": index,
        "pci_bus_id": f"00000000:{index:02x}:00.0",
        "total_bytes": 100,
        "free_bytes": 50,
        "used_bytes": 50,
    }
    return GpuInfo(**{**values, **more})


def gpus(count: int) -> list[GpuInfo]:
    return [gpu(index) for index in range(count)]


def indices(visible: Visible) -> list[int]:
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
def test_what_is_hidden_on_purpose_means_cpu_without_a_warning(mask: str) -> None:
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
def test_what_is_hidden_by_a_mistake_is_a_warning_with_a_way_out(mask, entry, shown):
    visible = resolve_mask(mask, gpus(3))
    assert indices(visible) == shown
    assert not visible.hidden_on_purpose
    assert visible.warning is not None
    assert f"CUDA_VISIBLE_DEVICES={mask}: the entry '{entry}'" in visible.warning
    assert "unset the variable" in visible.warning


def test_a_unique_prefix_names_a_gpu_and_an_ambiguous_one_ends_the_list() -> None:
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
def test_slices_are_named_by_uuid_or_the_gpu_they_are_cut_from(mask, uuids):
    visible = resolve_mask(mask, SLICED)
    assert [gpu.uuid for gpu in visible.gpus] == uuids


def test_one_process_addresses_one_slice_and_no_gpu_beside_it() -> None:
    visible = resolve_mask(None, SLICED)
    ordinals = {gpu.uuid: visible.ordinal(gpu.uuid) for gpu in visible.gpus}
    assert ordinals == {"GPU-000-x": None, "MIG-a": 0, "MIG-ab": None, "GPU-222-x": None}
    assert resolve_mask("2,0", gpus(3)).ordinal("GPU-000-x") == 1


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
def test_no_mask_ever_shows_what_it_does_not_name(mask: str) -> None:
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
        assert visible.hidden_on_purpose != (visible.warning is not None)


@given(order=st.permutations(range(4)), count=st.integers(1, 4))
def test_a_list_of_valid_numbers_shows_just_these_in_its_order(order, count):
    mask = ",".join(str(index) for index in order[:count])
    visible = resolve_mask(mask, gpus(4))
    assert indices(visible) == order[:count]
    assert visible.warning is None
    assert [visible.ordinal(gpu.uuid) for gpu in visible.gpus] == list(range(count))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [(None, False), ("", False), ("-1", False), ("GPU-1", False), ("0", True), (" +1,x", True)],
)
def test_only_numbers_depend_on_who_counts(mask: str | None, expected: bool) -> None:
    assert names_integers(mask) is expected


def test_a_gpu_that_could_not_be_read_keeps_its_place_as_an_unusable_one() -> None:
    inventory = Inventory((gpu(0), gpu(2)), (SkippedGpu(1, "it is ill", "GPU-111-x"),))
    visible = visible_gpus(inventory, {"CUDA_VISIBLE_DEVICES": "GPU-111,GPU-222"})
    assert indices(visible) == [1, 2]
    assert visible.gpus[0].unusable == "it is ill"
    assert visible.ordinal("GPU-222-x") == 1


def test_a_problem_of_the_machine_is_passed_on() -> None:
    visible = visible_gpus(Inventory(problem="no driver"), {})
    assert (visible, visible.why_none) == (Visible(), "no driver")


VISIBLE = """
import json, os
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.visible import visible_gpus
visible = [visible_gpus(read_inventory(), os.environ) for _ in range(3)][-1]
print(json.dumps([[gpu.uuid for gpu in visible.gpus], visible.warning]))
"""


def mixed(machine_with: MachineWith) -> Machine:
    """Three models; CUDA counts the last first."""
    machine = machine_with(Gpu("T4"), Gpu("T4"), Gpu("H100"))
    machine.cuda_order = [machine.uuid(2), machine.uuid(0), machine.uuid(1)]
    machine.update(0)
    return machine


def test_numbers_on_a_mixed_machine_follow_cudas_own_order(cuda_machine_with: MachineWith) -> None:
    machine = mixed(cuda_machine_with)
    uuids, warning = machine.python(VISIBLE, CUDA_VISIBLE_DEVICES="0,1")
    assert uuids == [machine.uuid(2), machine.uuid(0)]
    assert warning is None
    assert len(machine.calls("cuInit")) == 1  # asked once, in another process
    assert machine.calls("cuInit")[0][0] != machine.calls("nvmlInit")[0][0]
    assert machine.python(VISIBLE)[0] == machine.cuda_order


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [0]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-00000002"}, [2]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_cuda_is_not_asked_where_its_order_does_not_matter(cuda_machine_with, environ, shown):
    machine = mixed(cuda_machine_with)
    assert machine.python(VISIBLE, **environ)[0] == [machine.uuid(number) for number in shown]
    assert machine.calls("cuInit") == []


def test_equal_models_are_counted_in_pci_order_without_asking_cuda(cuda_machine_with):
    machine = cuda_machine_with(Gpu(), Gpu())
    assert machine.python(VISIBLE, CUDA_VISIBLE_DEVICES="1")[0] == [machine.uuid(1)]
    assert machine.calls("cuInit") == []


def test_pci_order_with_a_warning_where_cuda_cannot_be_asked(cuda_machine_with):
    machine = cuda_machine_with(Gpu("T4"), Gpu("H100"))
    machine.fail("cuInit", 100)
    uuids, warning = machine.python(VISIBLE, CUDA_VISIBLE_DEVICES="1")
    assert uuids == [machine.uuid(1)]
    assert "CUDA_VISIBLE_DEVICES=1" in warning
    assert "PCI order" in warning
    assert "cuInit failed with CUDA error 100" in warning


def ill_first(machine_with: MachineWith) -> Machine:
    """Three GPUs of which NVML cannot read the first."""
    machine = machine_with(Gpu(), Gpu(), Gpu())
    for function in ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo"):
        machine.fail(function, 999, 0)
    return machine


def test_an_ill_gpu_that_cuda_does_not_count_shifts_the_numbers(cuda_machine_with):
    machine = ill_first(cuda_machine_with)
    machine.cuda_order = [machine.uuid(1), machine.uuid(2)]
    machine.update(0)
    assert machine.python(VISIBLE, CUDA_VISIBLE_DEVICES="0")[0] == [machine.uuid(1)]


def test_an_ill_gpu_keeps_its_number_where_cuda_cannot_be_asked(cuda_machine_with):
    machine = ill_first(cuda_machine_with)
    machine.fail("cuInit", 100)
    uuids, warning = machine.python(VISIBLE, CUDA_VISIBLE_DEVICES="1,0")
    assert uuids == [machine.uuid(1), machine.uuid(0)]
    assert warning is not None


def test_gpus_are_named_by_number_only_where_every_number_is_known() -> None:
    first, second = (GpuInfo(f"GPU-{n}", "A", n, str(n), 1, 1, 0, cuda_index=n) for n in (0, 1))
    assert mask_for((second, first), by_index=True) == "1,0"
    assert mask_for((second, first), by_index=False) == "GPU-1,GPU-0"
    assert mask_for((first, replace(second, cuda_index=None)), by_index=True) == "GPU-0,GPU-1"
    assert mask_for((), by_index=True) == ""


@pytest.mark.parametrize(
    ("environ", "owner"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "0"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "3"}, "Slurm"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_GPUS": "0,1"}, "Slurm"),
        ({"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "1"}, "Slurm"),
        ({"SLURM_JOB_ID": "7"}, None),  # GPUs that Slurm knows nothing of
        ({"SLURM_JOB_GPUS": "3"}, None),
        ({"RAY_RAYLET_PID": "1", "CUDA_VISIBLE_DEVICES": "1"}, "Ray"),
        ({"RAY_RAYLET_PID": "1", "CUDA_VISIBLE_DEVICES": ""}, None),
        ({"RAY_RAYLET_PID": "1"}, None),  # a task that asked for no GPU
    ],
)
def test_who_has_allocated_the_gpus(environ: dict[str, str], owner: str | None):
    assert allocated_by(environ) == owner
