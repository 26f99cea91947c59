"""Figures of memory, on the host, from NVML, and from the allocator's snapshot."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import robust_train
import robust_train as memory
from robust_train.attempt.run import Run
from robust_train.attempt.runner import call_trainer
from robust_train.config.checks import checked
from robust_train.config.composition import complete
from robust_train.host.memory import cgroup_rooms, own_memory, reset_peak
from robust_train.memory.cuda import unused_blocks
from robust_train.model.errors import RankFailure
from robust_train.model.events import Event, MemoryReported
from robust_train.model.failure import Failure, FailureKind
from simulated_nvml import MIB, Gpu, Machine

MachineWith = Callable[..., Machine]

needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="what a machine without CUDA does"
)


def test_the_functions_can_be_imported_without_torch() -> None:
    code = (
        "import sys, robust_train as m\n"
        "homes = {name: home for name, home in m._HOMES.items() if home.startswith('memory')}\n"
        "[getattr(m, name) for name in homes]\n"
        "m.clear_gpu_memory(force=True); m.safe_tensor_to_cpu({'a': [1]})\n"
        "m.get_gpu_memory_stats(); m.reset_peak_memory_stats()\n"
        "print('torch' in sys.modules, len(homes))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False 12\n"
    assert robust_train.get_cuda_memory_info is robust_train.get_gpu_memory_stats
    assert robust_train.clear_cuda_memory is robust_train.clear_gpu_memory


def _splits(run: Run) -> None:
    model = torch.nn.Linear(1, 1)
    run.backward(lambda part: torch.empty(2**46).sum(), torch.ones(8, 1), model)


def _breaks(run: Run) -> None:
    raise ValueError("a bug")


def _hears_of_it(run: Run) -> None:
    raise RankFailure(1, Failure(FailureKind.HOST_OOM, "out of memory"), is_elsewhere=True)


@pytest.mark.parametrize(
    ("train", "is_recorded"), [(_splits, True), (_breaks, False), (_hears_of_it, False)]
)
def test_every_trainer_that_runs_out_of_memory_leaves_the_figures(
    tmp_path, train, is_recorded, caplog
):
    events: list[Event] = []
    run = Run(run_dir=tmp_path, report=events.append)
    cfg = complete({"device": "cpu", "memory": {"log_frequency": 1}})
    with caplog.at_level("INFO"), pytest.raises((RuntimeError, MemoryError, ValueError)):
        call_trainer(lambda cfg, run: train(run), cfg, checked(cfg), run)
    recorded = [event.milestone for event in events if isinstance(event, MemoryReported)]
    assert recorded == ["out of memory"] * is_recorded
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("out of memory: ") for line in lines) is is_recorded


@needs_no_gpu
def test_without_cuda_the_figures_are_the_hosts_and_say_so() -> None:
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


@needs_no_gpu
def test_the_figures_are_printed_and_logged(capsys, caplog) -> None:
    memory.print_cuda_memory_info()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["device", "cpu", "(no", "CUDA", "in", "this", "process)"]
    assert [line.split()[0] for line in lines[1:3]] == ["allocated", "reserved"]
    assert all(line.endswith("MiB") for line in lines[1:])
    with caplog.at_level(logging.INFO, "robust_train"):
        stats = memory.log_gpu_memory_stats("after epoch 3")
    (record,) = caplog.records
    assert record.message == f"after epoch 3: {stats.description}"


def test_before_cuda_is_started_nvml_tells_of_the_gpu_that_would_be_used(machine_with):
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
def test_what_names_no_device_is_refused_in_a_line(device) -> None:
    with pytest.raises(ValueError, match="device"):
        memory.get_gpu_memory_stats(device)


def segment(device: int, *sizes: int, pool: tuple[int, int] = (0, 0)) -> dict[str, object]:
    """A segment as torch lists it, with unused blocks of these sizes."""
    blocks = [{"state": "inactive", "size": size} for size in sizes]
    used = {"state": "active_allocated", "size": 1000}
    return {"device": device, "segment_pool_id": pool, "blocks": [used, *blocks]}


def test_only_unused_blocks_of_the_devices_common_pool_count() -> None:
    segments = [segment(0, 3, 9), segment(0, 100, pool=(0, 1)), segment(0), segment(1, 70)]
    assert unused_blocks(segments, 0) == (9, 0.25)
    assert unused_blocks(segments, 2) == (0, 0)


@given(st.lists(st.integers(1, 2**40), max_size=20))
def test_fragmentation_is_a_share_and_nothing_for_one_block(sizes) -> None:
    _, share = unused_blocks([segment(0, *sizes)], 0)
    assert 0 <= share < 1
    assert (share == 0) == (len(sizes) <= 1)


def test_proc_s_sizes_are_read_in_bytes(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tkB python\nVmRSS:\t     12 kB\nThreads:\t3\nVmBad:\tx kB\n")
    assert own_memory(status) == {"VmRSS": 12 * 1024}


V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("above", "rooms"),
    [
        (("600\n", "500\n", "anon 1\ninactive_file 100\n"), [(600, 200)]),
        (("600\n", "700\n", ""), [(600, 0)]),
        (("max\n", "1\n", ""), []),
        ((f"{2**63 - 4096}\n", "1\n", ""), []),
        (("600\n", "?\n", ""), []),
        (("600\n",), []),  # the others cannot be read
        ((), []),
    ],
)
def test_a_cgroup_above_limits_what_there_is_where_it_has_a_limit(tmp_path, above, rooms):
    proc, job = tmp_path / "proc/self", tmp_path / "sys/fs/cgroup/job"
    for folder, names, texts in (
        (proc, ("cgroup", "mountinfo"), ("0::/job/inner\n", V2_MOUNT)),
        (job, ("memory.max", "memory.current", "memory.stat"), above),
        (job / "inner", ("memory.max", "memory.current"), ("max\n", "1\n")),
    ):
        folder.mkdir(parents=True)
        for name, text in zip(names, texts, strict=False):
            (folder / name).write_text(text)
    assert cgroup_rooms(tmp_path) == rooms


def test_a_kernel_that_keeps_its_peak_says_so(tmp_path: Path) -> None:
    assert not reset_peak(tmp_path / "missing" / "clear_refs")


def test_the_memory_functions_are_names_of_both():
    """README's names are importable from ``robust_train.memory`` too."""
    names = set(dir(robust_train.memory)) & set(robust_train.__all__)
    assert {"GPUMemoryContext", "clear_gpu_memory", "save_checkpoint"} <= names
    for name in dir(robust_train.memory):
        own = getattr(robust_train.memory, name)
        assert getattr(robust_train, name, own) is own
