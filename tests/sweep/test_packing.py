"""How many jobs of a sweep share its GPUs, as pure functions."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_train.config.checks import checked
from robust_train.config.composition import complete
from robust_train.config.schema import RobustConfig
from robust_train.model.errors import ConfigError
from robust_train.queue.registry import QueuedJob, Registry
from robust_train.readable import GIB
from robust_train.sweep.packing import GpuMemory, Look, Packer, Packing, largest_first, room_for

LEAST = st.integers(1, 8)
LOOKS = st.builds(
    Look,
    on_gpus=st.integers(0, 40),
    waiting=st.integers(0, 3),
    measured=st.integers(0, 40),
    room=st.integers(-2, 12),
    rate=st.none() | st.floats(0.1, 1e5),
    is_silent=st.booleans(),
)


def packed(least, rate_of, memory=1000):
    """Return how many jobs run in the end, if their speed together follows from their number."""
    packing = Packing(least, least)
    for _ in range(60):
        count = packing.limit
        look = Look(count, measured=count, room=memory - count, rate=rate_of(count))
        packing = packing.after(look)
    return packing.limit


@settings(max_examples=60, deadline=None)
@given(LEAST, st.lists(LOOKS, max_size=12))
def test_the_limit_stays_between_one_and_the_room(least, looks):
    """Never below one job per GPU, and never more are added than memory has room for."""
    packing = Packing(least, least)
    for look in looks:
        after = packing.after(look)
        assert after.limit >= least, look
        added = after.limit - packing.limit
        assert added <= max(min(look.room, least), 0)
        if look.waiting or not look.measured:
            assert after == packing, look
        packing = after


@settings(max_examples=60, deadline=None)
@given(LEAST, st.integers(1, 6))
def test_jobs_are_added_until_gpus_are_saturated(least, useful):
    """GPUs with this many jobs each, to which at most one more job was added."""
    full = least * useful
    assert packed(least, lambda count: 100.0 * min(count, full)) == full


@settings(max_examples=60, deadline=None)
@given(LEAST, st.integers(1, 50))
def test_memory_ends_what_speed_allows(least, memory):
    count = packed(least, lambda number: 100.0 * number, memory=memory)
    assert count == max(least, memory)


def test_nothing_is_added_before_a_measurement():
    packing = Packing(2, 2)
    assert packing.after(Look(2, room=9, rate=1.0)) == packing
    assert packing.after(Look(2, measured=2, room=9)) == packing, "the speed is not known yet"
    assert packing.after(Look(1, measured=1, room=9, rate=1.0)) == packing, "one has no GPU yet"


def test_silent_jobs_are_added_by_memory():
    packing = Packing(2, 2).after(Look(2, measured=2, room=1, is_silent=True))
    assert packing.limit == 3


def test_saturation_is_final():
    packing = Packing(2, 2, {2: 100.0}).after(Look(2, measured=2, room=9, rate=100.0))
    packing = packing.after(Look(4, measured=4, room=9, rate=101.0))
    assert packing.is_saturated
    assert packing.limit == 2
    assert packing.after(Look(2, measured=2, room=9, rate=900.0)) == packing


JOB = QueuedJob(reserved_bytes=10 * GIB, gpus=("A",), taken_bytes=(None,), jobs_per_device=16)


def test_room_is_left_by_open_jobs_only():
    gpus = {"A": GpuMemory(40 * GIB), "B": GpuMemory(40 * GIB)}
    assert room_for(10 * GIB, gpus, []) == 8
    assert room_for(10 * GIB, gpus, [JOB, JOB]) == 6
    alone = QueuedJob(reserved_bytes=4 * GIB, gpus=("B",), taken_bytes=(None,))
    assert room_for(10 * GIB, gpus, [JOB, alone]) == 3
    grown = QueuedJob(
        reserved_bytes=10 * GIB, gpus=("A",), taken_bytes=(25 * GIB,), jobs_per_device=16
    )
    assert room_for(10 * GIB, {"A": GpuMemory(40 * GIB)}, [grown]) == 1
    assert room_for(0, gpus, []) == 0


def test_programs_outside_the_queue_leave_less_room():
    job = QueuedJob(
        reserved_bytes=10 * GIB, gpus=("A",), taken_bytes=(8 * GIB,), jobs_per_device=16
    )
    assert room_for(10 * GIB, {"A": GpuMemory(40 * GIB, 8 * GIB)}, [job]) == 3
    assert room_for(10 * GIB, {"A": GpuMemory(40 * GIB, 20 * GIB)}, [job]) == 1
    assert room_for(10 * GIB, {"A": GpuMemory(40 * GIB, 40 * GIB)}, [job]) == 0


@pytest.mark.parametrize(("used_outside", "limit"), [(0, 2), (20, 1)])
def test_gpus_are_read_again_before_jobs_join(tmp_path, used_outside, limit):
    """A program outside the queue has started since the sweep began. The job reports no steps."""
    registry = Registry(tmp_path)
    folder = tmp_path / "job"
    job = QueuedJob(run_dir=str(folder), reserved_bytes=12 * GIB, jobs_per_device=16)
    reservation = registry.enter(job)
    reservation.update(reservation.job.on(["A"], taken_bytes=(10 * GIB,)))
    now = {"A": GpuMemory(40 * GIB, (10 + used_outside) * GIB)}
    settings = RobustConfig(gpu_queue=str(tmp_path))
    packer = Packer(settings, 1, {"A": GpuMemory(40 * GIB)}, lambda: now)
    packer.look([folder])
    assert packer.packing.limit == limit
    reservation.release()


@pytest.mark.parametrize(("total_of_second", "limit"), [(24, 2), (12, 1)])
def test_jobs_of_two_gpus_need_room_on_both(tmp_path, total_of_second, limit):
    job = QueuedJob(run_dir=str(tmp_path), reserved_bytes=12 * GIB, jobs_per_device=16, count=2)
    reservation = Registry(tmp_path).enter(job)
    reservation.update(reservation.job.on(["A", "B"]))
    gpus = {"A": GpuMemory(24 * GIB), "B": GpuMemory(total_of_second * GIB)}
    packer = Packer(RobustConfig(gpu_queue=str(tmp_path), num_gpus=2), 1, gpus, lambda: gpus)
    packer.look([tmp_path])
    assert packer.packing.limit == limit
    reservation.release()


def test_largest_micro_batches_start_first():
    listed = {
        0: ["training.batch_size=8"],
        1: ["lr=1"],
        2: ["robust.training.batch_size=64"],
        3: ["lr=2", "training.batch_size=8"],
    }
    assert list(largest_first(listed)) == [2, 0, 3, 1]


def test_packed_jobs_keep_a_declared_figure():
    """It is measured, so that others fit beside it, but never falls below the user's number."""
    config = checked(complete({"gpu_jobs_per_device": "auto", "min_gpu_memory_mb": 20000}))
    assert config.packs_gpus
    assert not config.measures_memory
    assert config.min_gpu_memory_mb == 20000


def test_auto_begins_with_the_job_alone():
    config = checked(complete({"gpu_jobs_per_device": "auto"}))
    assert config.packs_gpus
    assert config.measures_memory
    assert config.gpu_jobs_per_device == 1
    assert not checked(complete({"gpu_jobs_per_device": 3})).packs_gpus


def test_a_batch_that_fills_the_gpu_is_refused():
    both = {"gpu_jobs_per_device": "auto", "training": {"batch_size": "auto"}}
    with pytest.raises(ConfigError, match="fills a GPU with one job"):
        checked(complete(both))
