"""find_best_device: a device that means the chosen GPU in the calling process."""

from __future__ import annotations

from collections.abc import Callable

from simulated_nvml import Gpu, Machine, Slice

MachineWith = Callable[..., Machine]

FIND = """
import json, logging, os, sys
logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stderr)
{before}
from robust_train import find_best_device
found = []
for mask, need in {cases}:
    os.environ.pop("CUDA_DEVICE_ORDER", None)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if mask is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = mask
    found.append([str(find_best_device(need)), os.environ.get("CUDA_DEVICE_ORDER")])
print(json.dumps(found))
"""
START_CUDA = "import ctypes; cuda = ctypes.CDLL('libcuda.so.1'); cuda.cuInit(0)"
Case = tuple[str | None, int]


def find(machine: Machine, *cases: Case, before: str = "") -> list[list[str]]:
    found: list[list[str]] = machine.python(FIND.format(before=before, cases=cases))
    return found


def test_the_number_means_the_freest_gpu_in_pci_order_within_the_mask(cuda_machine_with):
    machine = cuda_machine_with(Gpu("T4", free_mib=6000), Gpu("T4"), Gpu("H100", free_mib=9000))
    machine.cuda_order = [machine.uuid(2), machine.uuid(0), machine.uuid(1)]
    machine.update(1, free_mib=5000)
    # without a mask the order is made sure of; with one the user's order is left alone
    assert find(machine, (None, 4000), ("0,1", 4000)) == [
        ["cuda:2", "PCI_BUS_ID"],
        ["cuda:0", None],
    ]


def test_once_cuda_has_started_its_own_numbers_count(cuda_machine_with: MachineWith) -> None:
    machine = cuda_machine_with(Gpu("T4", free_mib=5000), Gpu("H100", free_mib=9000))
    machine.cuda_order = [machine.uuid(1), machine.uuid(0)]
    machine.update(0)
    # a variable that is set after CUDA has started counts no longer
    assert find(machine, ("0", 4000), before=START_CUDA) == [["cuda:0", None]]


def test_only_the_slice_that_a_process_can_address_is_considered(cuda_machine_with):
    machine = cuda_machine_with(Gpu(), Gpu(mig=[Slice(5000), Slice(9000)]))
    assert [device for device, _ in find(machine, (None, 4000), (None, 6000))] == ["cuda:0", "cpu"]


def test_without_a_suitable_gpu_it_is_the_cpu_and_the_log_has_the_reason(machine_with):
    cases = ((None, 4000), ("", 4000), ("7", 4000))
    process = machine_with(Gpu(free_mib=3999)).start(FIND.format(before="", cases=cases))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.count('"cpu"') == 3
    assert err.count("training on the CPU") == 3
    for reason in (
        "needs 4000 MiB free",
        "CUDA_VISIBLE_DEVICES hides every GPU",
        "the entry '7' is out of range",
    ):
        assert reason in err
