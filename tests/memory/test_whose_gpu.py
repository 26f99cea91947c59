"""Which GPU is meant, and what is never asked of CUDA: a torch whose calls are counted."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import robust_train as memory
from robust_train.attempt.memory_upkeep import AttemptMemory
from robust_train.attempt.run import Run
from robust_train.config.schema import MemoryConfig, RobustConfig
from robust_train.failures import classify_failure
from robust_train.gpu.processes import footprint, learn_context_bytes, learned_context_bytes
from robust_train.memory import stats as in_use
from robust_train.memory.clearing import return_memory
from robust_train.memory.cuda import busiest_gpu, cached_on, limit_when_cuda_starts
from robust_train.model.failure import FailureKind
from robust_train.model.gpu import GpuInfo, GpuProcess, Inventory
from robust_train.readable import GIB, MIB

OWN, PRIVATE = (0, 0), (0, 1)


def settings(**memory: Any) -> RobustConfig:
    return RobustConfig(device="cuda:0", memory=MemoryConfig(**memory))


class AcceleratorError(RuntimeError):
    """As torch raises it after an illegal address, from every call that reaches the device."""


class FakeCuda:
    """Two GPUs; the process holds 3 GiB on the second, though the first is the current one.

    Calls that make a context where there is none are noted in ``contexts``.
    """

    def __init__(self, *, is_broken: bool = False, pool: tuple[int, int] = OWN) -> None:
        self.contexts = {1}
        self.is_broken = is_broken
        self.pool = pool
        self.workspaces_cleared = 0
        self.reset: list[int] = []
        self.current = 0
        self.fractions: dict[int, float] = {}

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return self.current

    def memory_reserved(self, index: int) -> int:
        self._answer()
        return 3 * GIB * index

    def memory_allocated(self, index: int) -> int:
        self._answer()
        return 2 * GIB * index

    max_memory_allocated = memory_allocated

    def memory_stats(self, index: int) -> dict[str, int]:
        self._answer()
        return {"allocated_bytes.all.current": 2 * GIB * index}

    def memory_stats_as_nested_dict(self, index: int) -> dict[str, Any]:
        names = {"allocated_bytes": self.memory_allocated, "reserved_bytes": self.memory_reserved}
        return {name: {"all": {"current": read(index)}} for name, read in names.items()}

    def memory_snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        self._answer()
        return [{"device": 1, "segment_pool_id": self.pool, "blocks": []}]

    def mem_get_info(self, index: int) -> tuple[int, int]:
        self._answer()
        self.contexts.add(index)
        return 10 * GIB, 80 * GIB

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(uuid=f"uuid-{index}", total_memory=80 * GIB)

    def reset_peak_memory_stats(self, index: int) -> None:
        self.reset.append(index)

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before

    def set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
        self._answer()
        self.current = index  # as torch does
        self.fractions[index] = fraction

    def ipc_collect(self) -> None:
        self._answer()

    empty_cache = ipc_collect

    def _lazy_call(self, action: Any) -> None:
        action()

    def _answer(self) -> None:
        if self.is_broken:
            raise AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch):
    """Make a fake the torch of this process."""

    def install(cuda: FakeCuda) -> FakeCuda:
        def clear() -> None:
            cuda.workspaces_cleared += 1

        private = SimpleNamespace(
            _cuda_clearCublasWorkspaces=clear,
            _cuda_hasPrimaryContext=cuda.contexts.__contains__,
        )
        fake = SimpleNamespace(cuda=cuda, _C=private, Tensor=type("Tensor", (), {}))
        fake.optim = SimpleNamespace(Optimizer=type("Optimizer", (), {}))
        monkeypatch.setitem(__import__("sys").modules, "torch", fake)
        return cuda

    return install


def inventory(*processes: GpuProcess, **_: object) -> Inventory:
    gpus = (
        GpuInfo(f"GPU-uuid-{i}", "A GPU", i, f"{i}", 80 * GIB, 7 * GIB, 73 * GIB) for i in (0, 1)
    )
    first, second = gpus
    shown = GpuInfo(**{**vars(second), "processes": processes})
    return Inventory((first, shown))


def test_the_gpu_that_the_model_is_on_counts_though_another_is_the_current_one(use):
    cuda = use(FakeCuda())
    assert busiest_gpu(SimpleNamespace(cuda=cuda)) == 1
    assert in_use.memory_in_use(context=False) == {
        "allocated": 2 * GIB,
        "reserved": 3 * GIB,
        "max_allocated": 2 * GIB,
    }
    assert memory.get_gpu_memory_stats().device == "cuda:1"
    memory.reset_peak_memory_stats()
    with memory.GPUMemoryContext() as block:
        pass
    assert block.device == "cuda:1"
    assert set(cuda.reset) == {1}
    assert memory.set_memory_fraction(0.5).device == "cuda:1"
    assert cuda.current_device() == 0


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_limit_that_the_user_exports_is_never_raised(use, monkeypatch, name):
    monkeypatch.setenv(name, "expandable_segments:True,per_process_memory_fraction:0.5")
    cuda = use(FakeCuda())
    for asked, limit in ((0.95, 0.5), (1, 0.5), (0.25, 0.25)):
        assert limit_when_cuda_starts(asked, 0)
        assert memory.set_memory_fraction(asked).fraction == limit
        assert cuda.fractions == {0: limit, 1: limit}


def test_a_question_makes_no_context_on_another_gpu(use, monkeypatch):
    monkeypatch.setattr("robust_train.gpu.inventory.read_inventory", inventory)
    cuda = use(FakeCuda())
    other = memory.get_gpu_memory_stats("cuda:0")
    assert (other.device, other.free, other.total) == ("cuda:0", 7 * GIB, 80 * GIB), "as NVML says"
    memory.set_memory_fraction(0.5)
    return_memory(workspaces=True)
    assert cuda.contexts == {1}


@pytest.mark.parametrize(("pool", "cleared"), [(OWN, 1), (PRIVATE, 0)])
def test_workspaces_that_a_cuda_graph_may_know_by_address_stay(use, pool, cleared):
    cuda = use(FakeCuda(pool=pool))
    return_memory(thorough=False)
    assert cuda.workspaces_cleared == 0, "never between steps"
    return_memory(workspaces=True)
    assert cuda.workspaces_cleared == cleared
    memory.clear_gpu_memory()
    assert cuda.workspaces_cleared == 2 * cleared


def test_periodic_save_and_epoch_clearings_leave_workspaces_alone(use, tmp_path):
    cuda = use(FakeCuda())
    events: list[Any] = []
    run = Run(run_dir=tmp_path, report=events.append)
    memory = {"sample_interval_ms": 0, "empty_cache_frequency": 1, "empty_cache_threshold": 0.0}
    run.memory_keeper = keeper = AttemptMemory(run, settings(**memory))
    with keeper:
        run.progress(1)
        run.progress(2)
        keeper.occasion("save")
        keeper.occasion("epoch")
    reasons = [event.reason for event in events if event.name == "memory_cleared"]
    assert reasons[:2] == ["start", "step"]
    assert cuda.workspaces_cleared == 0


def test_the_allocators_history_ends_after_some_hundred_steps(use, tmp_path):
    """It costs a few percent of a step that is short, and a job may run for days."""
    calls: list[Any] = []
    cuda = use(FakeCuda())
    cuda.memory = SimpleNamespace(_record_memory_history=lambda **given: calls.append(given))
    (tmp_path / "oom-attempt-1.json").touch()
    run = Run(run_dir=tmp_path)
    with AttemptMemory(run, settings(sample_interval_ms=0)) as keeper:
        for step in range(299):
            keeper.step_done(step)
        assert [given.get("enabled", True) for given in calls] == [True]
        for step in range(299, 900):
            keeper.step_done(step)
    assert [given.get("enabled", True) for given in calls] == [True, None]


def test_after_a_fault_of_the_device_nothing_that_is_asked_hides_it(use, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    use(FakeCuda(is_broken=True))
    run = Run(run_dir=tmp_path)
    keeper = AttemptMemory(run, settings(sample_interval_ms=10))
    error = AcceleratorError("CUDA error: an illegal memory access was encountered")

    def train() -> None:
        with keeper:
            run.record_memory("before the fault")
            raise error

    with pytest.raises(AcceleratorError) as raised:
        train()
    assert raised.value is error
    figures = in_use.memory_in_use()
    assert figures.keys() == {"resident", "max_resident"}
    keeper.clean_up(error)
    assert cached_on(0) is None
    assert "cannot empty the CUDA cache: CUDA error: an illegal memory access" in caplog.text


def test_a_context_is_measured_as_nvml_shows_it_and_learned_by_model(use, monkeypatch, tmp_path):
    import os

    use(FakeCuda())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    used = 3 * GIB + 600 * MIB
    for processes, expected in (
        ([GpuProcess(os.getpid(), used), GpuProcess(1, GIB)], 600 * MIB),
        ([GpuProcess(999_999, used)], 600 * MIB),  # in a container, and alone
        ([GpuProcess(999_999, used), GpuProcess(1, GIB)], None),
        ([GpuProcess(os.getpid(), None)], None),
        ([], None),
    ):
        monkeypatch.setattr(in_use, "read_inventory", lambda p=processes, **_: inventory(*p))
        assert in_use.memory_in_use().get("context_bytes") == expected
    assert learned_context_bytes("A GPU") is None
    before = footprint(GIB, "A GPU")
    for measured in (600 * MIB, 550 * MIB, 99 * GIB):
        learn_context_bytes("A GPU", {"context_bytes": measured})
    assert learned_context_bytes("A GPU") == 600 * MIB
    assert footprint(GIB, "A GPU") == before + 88 * MIB
    for damaged in ("[", '{"A GPU": Infinity}'):
        Path(tmp_path / "robust-train/contexts.json").write_text(damaged)
        assert footprint(GIB, "A GPU") == before


def test_where_nvml_lists_no_process_a_context_is_at_most_what_the_whole_gpu_holds(
    use, monkeypatch, tmp_path
):
    cuda = use(FakeCuda())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = footprint(GIB, "A GPU")
    for others, learned in (
        (9 * GIB, None),  # somebody else is there
        (800 * MIB, 1400 * MIB),
        (0, 600 * MIB),
        (100 * MIB, 600 * MIB),
        (-500 * MIB, 600 * MIB),
    ):
        used = 3 * GIB + 600 * MIB + others
        gpus = (GpuInfo("GPU-uuid-1", "A GPU", 1, "", 80 * GIB, 80 * GIB - used, used),)
        monkeypatch.setattr(in_use, "read_inventory", lambda g=gpus, **_: Inventory(g))
        figures = in_use.memory_in_use()
        assert figures["context_at_most_bytes"] == 600 * MIB + others
        learn_context_bytes("A GPU", figures)
        assert learned_context_bytes("A GPU") == learned
    assert cuda.contexts == {1}
    assert footprint(GIB, "A GPU") == before + 88 * MIB
    learn_context_bytes("A GPU", {"context_bytes": 700 * MIB})
    assert learned_context_bytes("A GPU") == 700 * MIB, "the process's own is exact"


def test_running_out_is_known_as_such_though_the_driver_answers_nothing(use):
    use(FakeCuda(is_broken=True))
    failure = classify_failure(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert failure.kind is FailureKind.DEVICE_OOM
    assert failure.evidence.requested_bytes == 2 * GIB
    assert failure.evidence.free_bytes is None
