"""When the CUDA cache is emptied during training."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_train.memory.steering import BackOff, Cost, should_clear
from robust_train.values import GIB


def clearings(steps: int, frequency: int, threshold: float, comes_back: bool) -> list[int]:
    """Steps at which a run clears whose tensors hold 2 GiB and whose steps need 8 more, once, or
    time and again."""
    state, reserved, done = BackOff(gap=frequency, due=frequency), 10 * GIB, []
    for step in range(1, steps + 1):
        if step < state.due:
            continue
        unused = 1 - 2 * GIB / max(reserved, 1)
        pays, state = should_clear(
            state, step, reserved, unused, frequency=frequency, threshold=threshold
        )
        if pays:
            done.append(step)
            state = replace(state, after=2 * GIB, returned=reserved - 2 * GIB)
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
    assert not should_clear(BackOff(10, 10), 10, 8 * GIB, 0.0, frequency=10)[0]


def test_a_spike_after_useless_clearings_is_returned_and_looked_for_often_again():
    state = BackOff(gap=640, due=1000, after=2 * GIB, returned=8 * GIB)
    pays, state = should_clear(state, 1000, 5 * GIB, 0.6, frequency=10, threshold=0.5)
    assert pays
    assert state.due == 1010


def test_what_a_checkpoint_takes_each_time_is_returned_ever_more_rarely():
    state, cleared = BackOff(), []
    for number in range(1, 20):
        if state.due is None or number >= state.due:
            pays, state = should_clear(state, number, 10 * GIB, 0.8)
            assert pays
            cleared.append(number)
            state = replace(state, after=2 * GIB, returned=8 * GIB)
    assert cleared == [1, 2, 4, 8, 16]


@given(st.floats(1e-6, 10), st.floats(0, 10), st.integers(2, 500))
def test_clearing_and_taking_again_take_one_percent_of_the_time(clearing, taking, steps):
    """Each clearing makes the next step longer; other steps take a second."""
    now, spent, cost, clearings = 0.0, 0.0, Cost().after_step(0.0), 0
    for _ in range(steps):
        longer = taking if cost.was_cleared else 0.0
        now, spent = now + 1.0 + longer, spent + longer
        cost = cost.after_step(now)
        if not clearings or (not cost.was_cleared and cost.is_affordable(now)):
            now, spent, clearings = now + clearing, spent + clearing, clearings + 1
            cost = cost.after_clearing(clearing, now)
    # the last one has not been paid for yet
    assert spent - (clearing + taking) <= 0.0101 * now + 1e-6


def test_a_step_after_a_clearing_is_no_measure_of_the_usual_one():
    cost = Cost().after_step(0.0).after_step(1.0).after_clearing(0.1, 1.1).after_step(5.1)
    assert cost.usual_step == 1.0
    assert cost.last == pytest.approx(3.1)
