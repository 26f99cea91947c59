"""Which GPU is meant, and what is never asked of CUDA: a torch whose calls are counted."""

import contextlib
import logging
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

import robust_train as memory
from robust_train.attempt.run import Run, live_of
from robust_train.config.schema import MemoryConfig, RobustConfig
from robust_train.failures import classify_failure
from robust_train.features.memory_upkeep.attempt import MemoryUpkeep
from robust_train.gpu.processes import footprint, learn_context_bytes, learned_context_bytes
from robust_train.memory import stats as in_use
from robust_train.memory.clearing import return_memory
from robust_train.memory.cuda import busiest_gpu, cached_on, limit_when_cuda_starts
from robust_train.model.failure import FailureKind
from robust_train.model.gpu import GpuInfo, GpuProcess, Inventory
from robust_train.readable import GIB, MIB
from taking_part import hooked, trained

OWN, PRIVATE = (0, 0), (0, 1)


def settings(**memory):
    return RobustConfig(device="cuda:0", memory=MemoryConfig(**memory))


class AcceleratorError(RuntimeError):
    """As torch raises it after an illegal address, from every call that reaches the device."""


class FakeCuda:
    """Two GPUs; the process holds 3 GiB on the second, though the first is the current one.

    Calls that make a context where there is none are noted in ``contexts``.
    """

    def __init__(self, *, is_broken=False, pool=OWN):
        self.contexts = {1}
        self.is_broken = is_broken
        self.pool = pool
        self.workspaces_cleared = 0
        self.reset = []
        self.current = 0
        self.fractions = {}
        self.is_available = self.is_initialized = lambda: True
        self.device_count = lambda: 2
        self.current_device = lambda: self.current
        self.reset_peak_memory_stats = self.reset.append
        self.ipc_collect = self.empty_cache = self._answer
        self._lazy_call = lambda action: action()

    def memory_reserved(self, index):
        self._answer()
        return 3 * GIB * index

    def memory_allocated(self, index):
        self._answer()
        return 2 * GIB * index

    max_memory_allocated = memory_allocated

    def memory_stats(self, index):
        return {"allocated_bytes.all.current": self.memory_allocated(index)}

    def memory_stats_as_nested_dict(self, index):
        names = {"allocated_bytes": self.memory_allocated, "reserved_bytes": self.memory_reserved}
        return {name: {"all": {"current": read(index)}} for name, read in names.items()}

    def memory_snapshot(self, include_traces=True):
        self._answer()
        return [{"device": 1, "segment_pool_id": self.pool, "blocks": []}]

    def mem_get_info(self, index):
        self._answer()
        self.contexts.add(index)
        return 10 * GIB, 80 * GIB

    def get_device_properties(self, index):
        return SimpleNamespace(uuid=f"uuid-{index}", total_memory=80 * GIB)

    @contextlib.contextmanager
    def device(self, index):
        before, self.current = self.current, index
        yield
        self.current = before

    def set_per_process_memory_fraction(self, fraction, index):
        self._answer()
        self.current = index  # as torch does
        self.fractions[index] = fraction

    def _answer(self):
        if self.is_broken:
            raise AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def use(monkeypatch, tmp_path):
    """Make a fake the torch of this process."""

    def install(**options):
        cuda = FakeCuda(**options)

        def clear():
            cuda.workspaces_cleared += 1

        private = SimpleNamespace(
            _cuda_clearCublasWorkspaces=clear,
            _cuda_hasPrimaryContext=cuda.contexts.__contains__,
        )
        fake = SimpleNamespace(cuda=cuda, _C=private, Tensor=type("Tensor", (), {}))
        fake.optim = SimpleNamespace(Optimizer=type("Optimizer", (), {}))
        monkeypatch.setitem(sys.modules, "torch", fake)
        return cuda

    return install


def gpu(index, **fields):
    known = GpuInfo(f"GPU-uuid-{index}", "A GPU", index, f"{index}", 80 * GIB, 7 * GIB, 73 * GIB)
    return replace(known, **fields)


def test_the_gpu_that_the_model_is_on_counts_though_another_is_the_current_one(use):
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
def test_a_limit_that_the_user_exports_is_never_raised(use, monkeypatch, name):
    monkeypatch.setenv(name, "expandable_segments:True,per_process_memory_fraction:0.5")
    cuda = use()
    for asked, limit in ((0.95, 0.5), (1, 0.5), (0.25, 0.25)):
        assert limit_when_cuda_starts(asked, 0)
        assert memory.set_memory_fraction(asked).fraction == limit
        assert cuda.fractions == {0: limit, 1: limit}


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
def test_workspaces_that_a_cuda_graph_may_know_by_address_stay(use, pool, cleared):
    cuda = use(pool=pool)
    return_memory(thorough=False)
    assert cuda.workspaces_cleared == 0, "never between steps"
    return_memory(workspaces=True)
    assert cuda.workspaces_cleared == cleared
    memory.clear_gpu_memory()
    assert cuda.workspaces_cleared == 2 * cleared


def test_periodic_save_and_epoch_clearings_leave_workspaces_alone(use, tmp_path):
    cuda = use()
    events = []
    run = Run(run_dir=tmp_path, report=events.append)
    memory = {"samples": False, "empty_cache_frequency": 1, "empty_cache_threshold": 0.0}
    keeper = hooked(run, MemoryUpkeep, settings(**memory))
    with trained(run):
        run.progress(1)
        run.progress(2)
        keeper.pause("save")
        keeper.pause("epoch")
    reasons = [event.reason for event in events if event.name == "memory_cleared"]
    assert reasons[:2] == ["start", "step"]
    assert cuda.workspaces_cleared == 0


def test_the_allocators_history_ends_after_some_hundred_steps(use, tmp_path):
    """It costs a few percent of a step that is short, and a job may run for days."""
    calls = []
    cuda = use()
    cuda.memory = SimpleNamespace(_record_memory_history=lambda **given: calls.append(given))
    (tmp_path / "oom-attempt-1.json").touch()
    run = Run(run_dir=tmp_path)
    hooked(run, MemoryUpkeep, settings(samples=False))
    with trained(run):
        for step in range(299):
            run.progress(step)
        assert [given.get("enabled", True) for given in calls] == [True]
        for step in range(299, 900):
            run.progress(step)
    assert [given.get("enabled", True) for given in calls] == [True, None]


def test_after_a_fault_of_the_device_nothing_that_is_asked_hides_it(use, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    use(is_broken=True)
    run = Run(run_dir=tmp_path)
    keeper = hooked(run, MemoryUpkeep, settings())
    error = AcceleratorError("CUDA error: an illegal memory access was encountered")

    def train():
        with trained(run):
            live_of(run).record_memory("before the fault")
            raise error

    with pytest.raises(AcceleratorError) as raised:
        train()
    assert raised.value is error
    assert in_use.memory_in_use().keys() == {"resident", "max_resident"}
    keeper.close(error)
    assert cached_on(0) is None
    assert "cannot empty the CUDA cache: CUDA error: an illegal memory access" in caplog.text
    failure = classify_failure(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert failure.kind is FailureKind.DEVICE_OOM
    assert failure.evidence.requested_bytes == 2 * GIB
    assert failure.evidence.free_bytes is None


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
    before = footprint(GIB, "A GPU")
    for measured in (600 * MIB, 550 * MIB, 99 * GIB):
        learn_context_bytes("A GPU", {"context_bytes": measured})
    assert learned_context_bytes("A GPU") == 600 * MIB
    assert footprint(GIB, "A GPU") == before + 88 * MIB
    for damaged in ("[", '{"A GPU": Infinity}'):
        (tmp_path / "cache/robust-train/contexts.json").write_text(damaged)
        assert footprint(GIB, "A GPU") == before


def test_where_nvml_lists_no_process_a_context_is_at_most_what_the_whole_gpu_holds(
    use, monkeypatch
):
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
