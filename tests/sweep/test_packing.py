"""How many jobs of a sweep share its GPUs, as pure functions."""

from hypothesis import given, settings
from hypothesis import strategies as st

from robust_train.queue.registry import QueuedJob
from robust_train.readable import GIB
from robust_train.sweep.packing import Look, Packing, largest_first, room_for

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
        assert after.limit >= least
        added = after.limit - packing.limit
        assert added <= max(min(look.room, least), 0)
        if look.waiting or not look.measured:
            assert after == packing
        packing = after


@settings(max_examples=60, deadline=None)
@given(LEAST, st.integers(1, 6))
def test_jobs_are_added_until_gpus_are_saturated(least, useful):
    """With GPUs that are busy with so many jobs each, at most one more on each was tried."""
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
    totals = {"A": 40 * GIB, "B": 40 * GIB}
    assert room_for(10 * GIB, totals, []) == 8
    assert room_for(10 * GIB, totals, [JOB, JOB]) == 6
    alone = QueuedJob(reserved_bytes=4 * GIB, gpus=("B",), taken_bytes=(None,))
    assert room_for(10 * GIB, totals, [JOB, alone]) == 3
    grown = QueuedJob(
        reserved_bytes=10 * GIB, gpus=("A",), taken_bytes=(25 * GIB,), jobs_per_device=16
    )
    assert room_for(10 * GIB, {"A": 40 * GIB}, [grown]) == 1
    assert room_for(0, totals, []) == 0


def test_largest_micro_batches_start_first():
    listed = {
        0: ["training.batch_size=8"],
        1: ["lr=1"],
        2: ["robust.training.batch_size=64"],
        3: ["lr=2", "training.batch_size=8"],
    }
    assert list(largest_first(listed)) == [2, 0, 3, 1]
