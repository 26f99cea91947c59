"""Choosing among GPUs, saying why one does not do, and find_best_device."""

from hypothesis import given
from hypothesis import strategies as st

from robust_train.gpu.select import explain, rank
from robust_train.model.gpu import GpuInfo
from robust_train.readable import MIB
from simulated_nvml import Gpu, Slice


def gpu(index, free, **more):
    named = {"uuid": f"GPU-{index:08x}-0000", "pci_bus_id": f"00000000:{index:02x}:00.0"}
    sizes = {"total_bytes": 100, "free_bytes": free, "used_bytes": 100 - free}
    return GpuInfo(**{"name": "A100", "index": index, **named, **sizes, **more})


GPUS = st.lists(
    st.builds(
        gpu,
        st.integers(0, 7),
        st.integers(0, 100),
        utilization_percent=st.none() | st.integers(0, 100),
        unusable=st.none() | st.just("it is ill"),
    ),
    max_size=8,
    unique_by=lambda item: item.index,
)


@given(gpus=GPUS, min_bytes=st.integers(0, 110), data=st.data())
def test_the_chosen_gpu_is_beaten_by_none(gpus, min_bytes, data):
    """It is suitable, and no other comes first in any order."""
    suitable = [g for g in gpus if g.unusable is None and g.free_bytes >= min_bytes]
    ranked = rank(gpus, min_bytes)
    assert set(ranked) == set(suitable)
    assert [gpu.free_bytes for gpu in ranked] == sorted(g.free_bytes for g in suitable)[::-1]
    assert rank(data.draw(st.permutations(gpus)), min_bytes) == ranked


def test_the_least_busy_of_equals_comes_first():
    """Among equally free GPUs; then the lowest address."""
    busy, idle = gpu(0, 50, utilization_percent=90), gpu(1, 50, utilization_percent=5)
    unknown = gpu(2, 50, utilization_percent=None)
    far = gpu(0, 50, pci_bus_id="00000001:01:00.0", utilization_percent=None)
    assert rank([far, unknown, busy, idle], 10) == [idle, busy, unknown, far]


def test_the_explanation_names_needs_and_figures():
    """It has the figures of each GPU."""
    full = gpu(0, 2200 * MIB, total_bytes=40960 * MIB)
    barred = gpu(1, 5, unusable="compute mode is prohibited")
    assert explain([full, barred], 4000 * MIB) == (
        "needs 4000 MiB free; GPU 0 (A100, GPU-00000000…): 2200 MiB of 40960 MiB free; "
        "GPU 1 (A100, GPU-00000001…): compute mode is prohibited"
    )


# --- a device that means the chosen GPU in the calling process ---

FIND = """
import json, logging, os, sys
logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stderr)
{before}
from robust_train import find_best_device
chosen = []
for mask, need in {cases}:
    os.environ.pop("CUDA_DEVICE_ORDER", None)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if mask is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = mask
    chosen.append([str(find_best_device(need)), os.environ.get("CUDA_DEVICE_ORDER")])
print(json.dumps(chosen))
"""
START_CUDA = "import ctypes; cuda = ctypes.CDLL('libcuda.so.1'); cuda.cuInit(0)"


def find(machine, *cases, before=""):
    return machine.python(FIND.format(before=before, cases=cases))


def test_an_index_means_visible_pci_order(cuda_machine_with):
    """``cuda:N`` of the freest GPU counts GPUs within the mask."""
    machine = cuda_machine_with(Gpu("T4", free_mib=6000), Gpu("T4"), Gpu("H100", free_mib=9000))
    machine.cuda_order = [machine.uuid(2), machine.uuid(0), machine.uuid(1)]
    machine.update(1, free_mib=5000)
    # without a mask the order is made sure of; with one the user's order is left alone
    assert find(machine, (None, 4000), ("0,1", 4000)) == [
        ["cuda:2", "PCI_BUS_ID"],
        ["cuda:0", None],
    ]


def test_once_cuda_has_started_its_own_numbers_count(cuda_machine_with):
    machine = cuda_machine_with(Gpu("T4", free_mib=5000), Gpu("H100", free_mib=9000))
    machine.cuda_order = [machine.uuid(1), machine.uuid(0)]
    machine.update(0)
    # a variable that is set after CUDA has started counts no longer
    assert find(machine, ("0", 4000), before=START_CUDA) == [["cuda:0", None]]


def test_only_the_addressable_slice_is_considered(cuda_machine_with):
    """A process can address a single one."""
    machine = cuda_machine_with(Gpu(), Gpu(mig=[Slice(5000), Slice(9000)]))
    assert [device for device, _ in find(machine, (None, 4000), (None, 6000))] == ["cuda:0", "cpu"]


def test_without_suitable_gpus_the_cpu_is_taken(machine_with):
    """The log has the reason."""
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
