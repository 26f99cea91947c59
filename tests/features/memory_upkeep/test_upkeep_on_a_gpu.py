"""What the upkeep of memory does on a GPU, and what it leaves alone there."""

import logging
from types import SimpleNamespace

import pytest

from fake_torch import AcceleratorError
from robust_train.attempt.run import Run, live_of
from robust_train.config.checks import checked
from robust_train.config.composition import complete
from robust_train.failures import classify_failure
from robust_train.features.memory_upkeep.attempt import MemoryUpkeep
from robust_train.memory import in_use
from robust_train.memory.cuda import cached_on
from robust_train.model.failure import FailureKind
from robust_train.readable import GIB
from taking_part import hooked, trained


def settings(**memory):
    return checked(complete({"device": "cuda:0", "memory": memory}))


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


def test_no_memory_query_hides_a_device_fault(use, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    use(is_broken=True)
    run = Run(run_dir=tmp_path)
    keeper = hooked(run, MemoryUpkeep, settings())
    error = AcceleratorError("CUDA error: an illegal memory access was encountered")

    def train():
        with trained(run):
            live_of(run).reports.record_memory("before the fault")
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
