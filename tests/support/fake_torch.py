"""A stand-in for torch on a machine with two GPUs, for tests that ask whose GPU is meant."""

import contextlib
import sys
from types import SimpleNamespace

import pytest

from robust_train.readable import GIB

OWN, PRIVATE = (0, 0), (0, 1)


class AcceleratorError(RuntimeError):
    """As torch raises it after an illegal address, from every call that reaches the device."""


class FakeCuda:
    """Two GPUs; the process holds 3 GiB on the second, though the first is the current one.

    A call that creates a missing context is noted in ``contexts``.
    """

    def __init__(self, *, is_broken=False, pool=OWN, is_integrated=0):
        self.contexts = {1}
        self.is_broken = is_broken
        self.is_integrated = is_integrated
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
        return SimpleNamespace(
            uuid=f"uuid-{index}", total_memory=80 * GIB, is_integrated=self.is_integrated
        )

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
            _cuda_clearCublasWorkspaces=clear, _cuda_hasPrimaryContext=cuda.contexts.__contains__
        )
        fake = SimpleNamespace(cuda=cuda, _C=private, Tensor=type("Tensor", (), {}))
        fake.optim = SimpleNamespace(Optimizer=type("Optimizer", (), {}))
        monkeypatch.setitem(sys.modules, "torch", fake)
        return cuda

    return install
