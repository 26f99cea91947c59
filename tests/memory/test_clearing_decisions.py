"""When the CUDA cache is emptied during training."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from robust_train.memory.pacing import AllocRetries, BackOff, Cost
from robust_train.values import GIB


def clearings(steps: int, frequency: int, threshold: float, comes_back: bool) -> list[int]:
    """Steps at which a run clears whose tensors hold 2 GiB and whose steps need 8 more, once, or
    time and again."""
    state, reserved, done = BackOff(frequency, threshold, skips_first=True), 10 * GIB, []
    for step in range(steps + 1):
        if not state.is_due(step):
            continue
        if state.check(step, reserved, 1 - 2 * GIB / max(reserved, 1)):
            done.append(step)
            state.cleared(after=2 * GIB, returned=reserved - 2 * GIB)
            reserved = 10 * GIB if comes_back else 2 * GIB
    return done


@given(st.integers(1, 200), st.floats(0, 0.8))
def test_what_training_takes_again_at_once_is_cleared_ever_more_rarely(frequency, threshold):
    assert len(clearings(100_000, frequency, threshold, comes_back=True)) <= 18


@given(st.integers(1, 200), st.floats(0, 0.8))
def test_what_stays_away_is_cleared_once(frequency, threshold):
    assert clearings(2000, frequency, threshold, comes_back=False) == [frequency]


@given(st.floats(0.81, 1))
def test_below_the_threshold_nothing_is_cleared(threshold):
    assert clearings(2000, 10, threshold, comes_back=True) == []


def test_memory_that_is_all_in_use_is_left_alone_whatever_the_threshold():
    assert not BackOff(10).check(10, 8 * GIB, 0.0)


def test_a_spike_after_useless_clearings_is_returned_and_looked_for_often_again():
    state = BackOff(10, 0.5)
    for number in (10, 20, 40):
        assert state.check(number, 10 * GIB, 0.8)
        state.cleared(after=2 * GIB, returned=8 * GIB)
    assert not state.is_due(79)
    assert state.check(80, 5 * GIB, 0.6)
    assert state.is_due(90)


def test_what_a_checkpoint_takes_each_time_is_returned_ever_more_rarely():
    state, cleared = BackOff(), []
    for number in range(1, 20):
        if state.is_due(number):
            assert state.check(number, 10 * GIB, 0.8)
            cleared.append(number)
            state.cleared(after=2 * GIB, returned=8 * GIB)
    assert cleared == [1, 2, 4, 8, 16]


@given(st.floats(1e-6, 10), st.floats(0, 10), st.integers(2, 500))
def test_clearing_and_taking_again_take_one_percent_of_the_time(clearing, taking, steps):
    """Each clearing makes the next step longer; other steps take a second."""
    now, spent, clearings, cost = 0.0, 0.0, 0, Cost()
    cost.step_done(0.0)
    for _ in range(steps):
        longer = taking if cost.was_cleared else 0.0
        now, spent = now + 1.0 + longer, spent + longer
        cost.step_done(now)
        if not clearings or cost.is_affordable(now):
            now, spent, clearings = now + clearing, spent + clearing, clearings + 1
            cost.clearing_done(clearing, now)
    # the last one has not been paid for yet
    assert spent - (clearing + taking) <= 0.0101 * now + 1e-6


def test_a_step_after_a_clearing_is_no_measure_of_the_usual_one():
    cost = Cost()
    for now in (0.0, 1.0):
        cost.step_done(now)
    cost.clearing_done(0.1, 1.1)
    cost.step_done(5.1)
    assert not cost.is_affordable(311.0)
    assert cost.is_affordable(311.2)


def test_memory_is_tight_when_two_steps_in_a_row_had_to_empty_the_cache():
    counts = [7, 7, 8, 8, 9, 11, 12, 12]  # what was before the first step is not the step's
    state, tight = AllocRetries(), []
    for count in counts:
        state = state.after_step(count)
        tight.append(state.is_tight)
    assert tight == [False, False, False, False, False, True, True, False]
