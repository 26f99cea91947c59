"""Which GPU is meant, and what is never asked of CUDA: a torch whose calls are counted."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

import robust_train as memory
from fake_torch import OWN, PRIVATE
from robust_train.gpu.footprint import (
    estimate_footprint,
    learn_context_bytes,
    learned_context_bytes,
)
from robust_train.memory import in_use
from robust_train.memory.clearing import return_memory
from robust_train.memory.cuda import busiest_gpu
from robust_train.memory.limits import limit_when_cuda_starts, share_of_unified_memory
from robust_train.model.gpu import GpuInfo, GpuProcess, Inventory
from robust_train.readable import GIB, MIB


def gpu(index, **fields):
    usual = GpuInfo(f"GPU-uuid-{index}", "A GPU", index, f"{index}", 80 * GIB, 7 * GIB, 73 * GIB)
    return replace(usual, **fields)


def test_the_gpu_of_the_model_counts(use):
    """Another GPU is the current device."""
    cuda = use()
    assert busiest_gpu(SimpleNamespace(cuda=cuda)) == 1
    figures = {"allocated": 2 * GIB, "reserved": 3 * GIB, "max_allocated": 2 * GIB}
    assert in_use.memory_in_use(context=False) == figures
    assert memory.get_gpu_memory_stats().device == "cuda:1"
    memory.reset_peak_memory_stats()
    with memory.GPUMemoryContext() as block:
        pass
    assert block.device == "cuda:1"
    assert set(cuda.reset) == {1}
    assert memory.set_memory_fraction(0.5).device == "cuda:1"
    assert cuda.current_device() == 0


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_an_exported_limit_is_never_raised(use, monkeypatch, name):
    monkeypatch.setenv(name, "expandable_segments:True,per_process_memory_fraction:0.5")
    cuda = use()
    for fraction, limit in ((0.95, 0.5), (1, 0.5), (0.25, 0.25)):
        assert limit_when_cuda_starts(fraction, 0)
        assert memory.set_memory_fraction(fraction).fraction == limit
        assert cuda.fractions == {0: limit, 1: limit}


def test_a_gpu_sharing_host_memory_leaves_some(use, monkeypatch, caplog):
    """The GPU has no memory of its own, and the host keeps a part."""
    caplog.set_level("INFO", "robust_train")
    available = SimpleNamespace(available=48 * GIB)
    monkeypatch.setattr("robust_train.memory.limits.read_host_memory", lambda: available)
    cuda = use(is_integrated=1)
    for fraction, limit in ((0.95, 0.5), (0.25, 0.25), (1.0, 1.0)):
        limit_when_cuda_starts(fraction, 0)
        assert cuda.fractions == {0: limit}
    assert caplog.messages == [
        "memory.fraction=0.95: GPU 0 is limited to 0.50 of its memory, of which 49152 MiB are "
        "free: it shares the host's memory"
    ]


def test_wsl_limits_the_free_memory(use, monkeypatch, caplog):
    """More than that spills into the host's memory without an error."""
    caplog.set_level("INFO", "robust_train")
    monkeypatch.setattr("robust_train.memory.limits.is_wsl", lambda: True)
    cuda = use()
    limit_when_cuda_starts(0.8, 1)
    assert cuda.fractions == {1: 0.1}
    assert "of which 10240 MiB are free: under WSL more would spill" in caplog.text


@pytest.mark.parametrize("gib", [4, 8, 64, 128])
def test_small_or_busy_machines_keep_some_memory(gib):
    """CPU and GPU share one memory, of which a quarter or some is kept."""
    total = gib * GIB
    assert share_of_unified_memory(0.95, total, total) <= 1 - min(8, gib / 4) / gib
    assert share_of_unified_memory(0.95, total, 0) == 1 / 16


def test_a_question_makes_no_context_on_another_gpu(use, monkeypatch):
    inventory = Inventory((gpu(0), gpu(1)))
    monkeypatch.setattr("robust_train.gpu.inventory.read_inventory", lambda **_: inventory)
    cuda = use()
    other = memory.get_gpu_memory_stats("cuda:0")
    assert (other.device, other.free, other.total) == ("cuda:0", 7 * GIB, 80 * GIB), "as NVML says"
    memory.set_memory_fraction(0.5)
    return_memory(workspaces=True)
    assert cuda.contexts == {1}


@pytest.mark.parametrize(("pool", "cleared"), [(OWN, 1), (PRIVATE, 0)])
def test_addressable_workspaces_of_cuda_graphs_stay(use, pool, cleared):
    """A graph may know them by address."""
    cuda = use(pool=pool)
    return_memory(thorough=False)
    assert cuda.workspaces_cleared == 0, "never between steps"
    return_memory(workspaces=True)
    assert cuda.workspaces_cleared == cleared
    memory.clear_gpu_memory()
    assert cuda.workspaces_cleared == 2 * cleared


def test_a_context_is_measured_as_nvml_shows_it(use, monkeypatch):
    use()
    used = 3 * GIB + 600 * MIB
    for processes, expected in (
        ((GpuProcess(os.getpid(), used), GpuProcess(1, GIB)), 600 * MIB),
        ((GpuProcess(999_999, used),), 600 * MIB),  # in a container, and alone
        ((GpuProcess(999_999, used), GpuProcess(1, GIB)), None),
        ((GpuProcess(os.getpid(), None),), None),
        ((), None),
    ):
        inventory = Inventory((gpu(0), gpu(1, processes=processes)))
        monkeypatch.setattr(in_use, "read_inventory", lambda i=inventory, **_: i)
        assert in_use.memory_in_use().get("context_bytes") == expected


def test_a_context_is_learned_by_model(tmp_path):
    assert learned_context_bytes("A GPU") == 0
    before = estimate_footprint(GIB, "A GPU")
    for measured in (600 * MIB, 550 * MIB, 99 * GIB):
        learn_context_bytes("A GPU", {"context_bytes": measured})
    assert learned_context_bytes("A GPU") == 600 * MIB
    assert estimate_footprint(GIB, "A GPU") == before + 88 * MIB
    for damaged in ("[", '{"A GPU": Infinity}'):
        (tmp_path / "cache/robust-train/contexts.json").write_text(damaged)
        assert estimate_footprint(GIB, "A GPU") == before, damaged


def test_unlisted_processes_bound_a_contexts_size(use, monkeypatch):
    """If NVML lists no process, a context is at most what the whole GPU holds."""
    cuda = use()
    for others, learned in (
        (9 * GIB, 0),  # somebody else is there
        (800 * MIB, 1400 * MIB),
        (0, 600 * MIB),
        (100 * MIB, 600 * MIB),
        (-500 * MIB, 600 * MIB),
    ):
        inventory = Inventory((gpu(1, used_bytes=3 * GIB + 600 * MIB + others),))
        monkeypatch.setattr(in_use, "read_inventory", lambda i=inventory, **_: i)
        figures = in_use.memory_in_use()
        assert figures["context_at_most_bytes"] == 600 * MIB + others
        learn_context_bytes("A GPU", figures)
        assert learned_context_bytes("A GPU") == learned
    assert cuda.contexts == {1}
    learn_context_bytes("A GPU", {"context_bytes": 700 * MIB})
    assert learned_context_bytes("A GPU") == 700 * MIB, "the process's own is exact"
