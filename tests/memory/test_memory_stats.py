"""Figures of memory, on the host, from NVML, and from the allocator's snapshot; peaks of blocks."""

import gc
import json
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import robust_train as memory
from robust_train.host import memory as host
from robust_train.memory.cuda import unused_blocks
from simulated_nvml import MIB, Gpu


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level("INFO", "robust_train")


def test_the_functions_can_be_imported_without_torch():
    code = (
        "import sys, robust_train as m\n"
        "homes = {name: home for name, home in m._MODULE_OF.items() if home.startswith('memory')}\n"
        "[getattr(m, name) for name in homes]\n"
        "m.clear_gpu_memory(force=True); m.safe_tensor_to_cpu({'a': [1]})\n"
        "m.get_gpu_memory_stats(); m.reset_peak_memory_stats()\n"
        "print('torch' in sys.modules, len(homes))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False 15\n"


def test_the_memory_functions_are_names_of_both():
    """README's names are importable from ``robust_train.memory`` too."""
    names = set(dir(memory.memory)) & set(memory.__all__)
    assert {"GPUMemoryContext", "clear_gpu_memory", "save_checkpoint"} <= names
    for name in dir(memory.memory):
        member = getattr(memory.memory, name)
        assert getattr(memory, name, member) is member
    assert memory.get_cuda_memory_info is memory.get_gpu_memory_stats
    assert memory.clear_cuda_memory is memory.clear_gpu_memory


def test_without_cuda_host_figures_are_shown():
    """They are marked as those of the host."""
    before = memory.get_gpu_memory_stats()
    held = torch.ones(16 * MIB)
    after = memory.get_gpu_memory_stats()
    assert before.device == "cpu"
    assert not before.on_gpu
    assert after.allocated - before.allocated >= 60 * MIB
    assert after.peak >= after.allocated
    assert 0 < after.free < after.total
    assert after.fragmentation is None
    assert after.description.startswith("no CUDA in this process; host memory: ")
    assert json.loads(json.dumps(after.as_dict()))["allocated"] == after.allocated
    del held


def test_the_figures_are_printed_and_logged(capsys, caplog):
    memory.print_cuda_memory_info()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["device", "cpu", "(no", "CUDA", "in", "this", "process)"]
    assert [line.split()[0] for line in lines[1:3]] == ["allocated", "reserved"]
    assert all(line.endswith("MiB") for line in lines[1:])
    stats = memory.log_gpu_memory_stats("after epoch 3")
    assert caplog.messages == [f"after epoch 3: {stats.description}"]


def test_nvml_answers_before_cuda_starts(machine_with):
    """It describes the GPU that would be used."""
    machine = machine_with(Gpu(total_mib=1000, free_mib=900), Gpu(total_mib=2000, free_mib=300))
    code = """
    import json
    from robust_train import get_gpu_memory_stats
    print(json.dumps([get_gpu_memory_stats().as_dict(), get_gpu_memory_stats("cpu").as_dict()]))
    """
    gpu, host = machine.python(code, CUDA_VISIBLE_DEVICES=machine.uuid(1))
    assert (gpu["device"], gpu["free"], gpu["total"]) == ("cuda:0", 300 * MIB, 2000 * MIB)
    assert gpu["allocated"] == gpu["reserved"] == 0
    assert "has not started CUDA; GPU 1 " in gpu["note"]
    assert host["device"] == "cpu"


@pytest.mark.parametrize("device", ["gpu0", "cuda:-1", -1, "cuda:"])
def test_an_unknown_device_is_refused_in_one_line(device):
    with pytest.raises(ValueError, match="device"):
        memory.get_gpu_memory_stats(device)


def segment(device, *sizes, pool=(0, 0)):
    """A segment as torch lists it, with unused blocks of these sizes."""
    blocks = [{"state": "inactive", "size": size} for size in sizes]
    used = {"state": "active_allocated", "size": 1000}
    return {"device": device, "segment_pool_id": pool, "blocks": [used, *blocks]}


@given(st.lists(st.integers(1, 2**40), max_size=20))
def test_only_unused_common_blocks_count(sizes):
    """These are the unused blocks of the device's common pool."""
    segments = [segment(0, 3, 9), segment(0, 100, pool=(0, 1)), segment(0), segment(1, *sizes)]
    assert unused_blocks(segments, 0) == (9, 0.25)
    largest, share = unused_blocks(segments, 1)
    assert largest == max(sizes, default=0)
    assert 0 <= share < 1
    assert (share == 0) == (len(sizes) <= 1)


def test_proc_s_sizes_are_read_in_bytes(tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tkB python\nVmRSS:\t     12 kB\nThreads:\t3\nVmBad:\tx kB\n")
    assert host.read_own_memory(status) == {"VmRSS": 12 * 1024}


V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("above", "rooms"),
    [
        (("600\n", "500\n", "anon 1\ninactive_file 100\nactive_file 30\n"), [(600, 230)]),
        (("600\n", "700\n", ""), [(600, 0)]),
        (("max\n", "1\n", ""), []),
        ((f"{2**63 - 4096}\n", "1\n", ""), []),
        (("600\n", "?\n", ""), []),
        (("600\n",), []),  # the others cannot be read
        ((), []),
    ],
)
def test_limits_of_parent_cgroups_count(tmp_path, above, rooms):
    """A cgroup above limits what there is if it has a limit."""
    proc, job = tmp_path / "proc/self", tmp_path / "sys/fs/cgroup/job"
    for folder, names, texts in (
        (proc, ("cgroup", "mountinfo"), ("0::/job/inner\n", V2_MOUNT)),
        (job, ("memory.max", "memory.current", "memory.stat"), above),
        (job / "inner", ("memory.max", "memory.current"), ("max\n", "1\n")),
    ):
        folder.mkdir(parents=True)
        for name, text in zip(names, texts, strict=False):
            (folder / name).write_text(text)
    assert host.read_cgroup_limits(tmp_path) == rooms


# --- the peak of a block of code, here of the host's resident memory ---

BIG = 64 * MIB  # well over the C library's threshold, so it comes from and goes to the system
SLACK = 8 * MIB

BLOCKS = f"""
import json
import os

# The kernel counts pages by CPU, and its peak lacks those that were counted on another one.
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
import robust_train as memory

BIG = {BIG}


def take(size=BIG):
    return bytearray(b"x") * size


with memory.GPUMemoryContext(device="cpu") as outer:
    take(2 * BIG)
    with memory.GPUMemoryContext() as inner:
        take()
    with memory.GPUMemoryContext() as second:
        kept = take(BIG // 2)
del kept
fails = memory.GPUMemoryContext()
try:
    with fails:
        take()
        raise KeyError
except KeyError:
    pass
with memory.GPUMemoryContext() as resets:
    take()
    stats = memory.reset_peak_memory_stats()
blocks = {{"outer": outer, "inner": inner, "second": second, "fails": fails, "resets": resets}}
names = ("device", "before", "peak", "after", "delta")
figures = {{key: {{name: getattr(block, name) for name in names}} for key, block in blocks.items()}}
print(json.dumps([figures, stats.peak - stats.allocated]))
"""


def take(size=BIG):
    return bytearray(b"x") * size


def risen(block):
    return block["peak"] - block["before"]


@pytest.fixture(scope="module")
def blocks():
    """Figures of blocks in a process of their own, and of a reset in the last of them.

    In this one they would be off by the pages of libraries, hundreds of MiB, that the kernel takes
    back within a block while other tests need memory.
    """
    command = [sys.executable, "-c", BLOCKS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def assert_forgotten(block):
    assert not [referrer for referrer in gc.get_referrers(block) if isinstance(referrer, list)]


def test_a_block_reports_its_own_memory(blocks):
    """Before, peak, after and what it left; an inner block its own."""
    outer, inner, second = (blocks[0][name] for name in ("outer", "inner", "second"))
    assert outer["device"] == "cpu"
    assert risen(outer) >= 2 * BIG - SLACK
    assert BIG - SLACK <= risen(inner) < 2 * BIG - SLACK
    assert abs(risen(second) - BIG // 2) < SLACK
    assert abs(outer["delta"] - BIG // 2) < SLACK
    assert outer["after"] == outer["before"] + outer["delta"]


def test_a_raising_block_still_has_figures(blocks, caplog):
    """The error is passed on."""
    assert risen(blocks[0]["fails"]) >= BIG - SLACK
    block = memory.GPUMemoryContext("forward")

    def fails():
        with block:
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert block.peak >= block.after > 0
    assert caplog.messages == [f"forward: {block.description}"]
    assert "host memory (resident)" in caplog.text
    assert_forgotten(block)


def test_an_inner_reset_loses_nothing(blocks, caplog):
    figures, above_the_reset = blocks
    assert above_the_reset < SLACK
    assert risen(figures["resets"]) >= BIG - SLACK
    memory.reset_peak_memory_stats()
    assert "no CUDA in this process" in caplog.text


def test_a_sandbox_without_peak_reports_the_rest(monkeypatch):
    """Its ``/proc`` knows no peak."""
    monkeypatch.setattr(host, "read_own_memory", lambda: {"VmRSS": 5})
    with memory.GPUMemoryContext(device="cpu") as block:
        pass
    assert (block.before, block.peak, block.after) == (5, 5, 5)


def test_an_unresettable_peak_gives_certain_figures(monkeypatch, caplog, tmp_path):
    """The kernel cannot reset it."""
    assert not host.reset_peak(tmp_path / "missing" / "clear_refs")
    take(4 * BIG)
    monkeypatch.setattr(host, "reset_peak", lambda: False)
    with memory.GPUMemoryContext() as block:
        take()
    # an earlier peak of the process is not passed off as the block's
    assert block.peak - block.before < 2 * BIG
    memory.reset_peak_memory_stats()
    assert "does not allow a reset of the peak" in caplog.text


def test_blocks_of_several_threads_end_in_any_order():
    first, second = memory.GPUMemoryContext(), memory.GPUMemoryContext()
    inside, leave = threading.Event(), threading.Event()

    def other():
        with second:
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with first:
        thread.start()
        inside.wait(30)
    leave.set()
    thread.join(30)
    assert second.peak >= second.after > 0
    assert_forgotten(first)
    assert_forgotten(second)
