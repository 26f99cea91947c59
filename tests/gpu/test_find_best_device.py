"""find_best_device: a device that means the chosen GPU in the calling process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simulated_nvml import Gpu, Machine, Slice

MachineWith = Callable[..., Machine]

FIND = """
import json, logging, os, sys
logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
{before}
from robust_train import find_best_device
device = str(find_best_device({arguments}))
print(json.dumps([device, os.environ.get("CUDA_DEVICE_ORDER")]))
"""
START_CUDA = "import ctypes; cuda = ctypes.CDLL('libcuda.so.1'); cuda.cuInit(0)"


def find(machine: Machine, before: str = "", arguments: str = "", **environ: str) -> list[str]:
    found: list[str] = machine.python(FIND.format(before=before, arguments=arguments), **environ)
    return found


def test_the_freest_gpu_is_numbered_in_pci_order_which_is_made_sure_of(
    cuda_machine_with: MachineWith,
) -> None:
    machine = cuda_machine_with(Gpu("T4", free_mib=5000), Gpu("H100", free_mib=9000))
    machine.cuda_order = [machine.uuid(1), machine.uuid(0)]
    machine.update(0)
    assert find(machine) == ["cuda:1", "PCI_BUS_ID"]


def test_the_number_counts_within_the_mask_and_the_users_order_is_left_alone(
    cuda_machine_with: MachineWith,
) -> None:
    machine = cuda_machine_with(Gpu("T4", free_mib=9000), Gpu("T4"), Gpu("H100", free_mib=5000))
    machine.cuda_order = [machine.uuid(2), machine.uuid(0), machine.uuid(1)]
    machine.update(0)
    assert find(machine, CUDA_VISIBLE_DEVICES="0,1") == ["cuda:1", None]


def test_once_cuda_has_started_its_own_numbers_count(cuda_machine_with: MachineWith) -> None:
    machine = cuda_machine_with(Gpu("T4", free_mib=5000), Gpu("H100", free_mib=9000))
    machine.cuda_order = [machine.uuid(1), machine.uuid(0)]
    machine.update(0)
    # a variable that is set after CUDA has started no longer says anything
    before = START_CUDA + "\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'"
    assert find(machine, before) == ["cuda:0", None]


def test_only_the_slice_that_a_process_can_address_is_considered(
    cuda_machine_with: MachineWith,
) -> None:
    machine = cuda_machine_with(Gpu(), Gpu(mig=[Slice(5000), Slice(9000)]))
    assert find(machine)[0] == "cuda:0"
    assert find(machine, arguments="min_memory_mb=6000")[0] == "cpu"


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (None, "needs 4000 MiB free"),
        ("", "CUDA_VISIBLE_DEVICES hides every GPU"),
        ("7", "the entry '7' is out of range"),
    ],
)
def test_without_a_suitable_gpu_it_is_the_cpu_and_the_log_says_why(
    machine_with: MachineWith, mask: str | None, said: str
) -> None:
    machine = machine_with(Gpu(free_mib=3999))
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    process = machine.start(FIND.format(before="", arguments=""), **environ)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert '"cpu"' in out.splitlines()[-1]
    assert "training on the CPU" in out
    assert said in out
