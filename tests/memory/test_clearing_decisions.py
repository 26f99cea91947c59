"""When the CUDA cache is emptied during training."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from robust_train.memory.steering import Periodic, is_affordable, look
from robust_train.values import GIB


def clearings(steps: int, frequency: int, threshold: float, comes_back: bool) -> list[int]:
    """Steps at which a run clears whose tensors hold 2 GiB and whose steps need 8 more, once, or
    time and again."""
    state, reserved, done = Periodic(gap=frequency, due=frequency), 10 * GIB, []
    for step in range(1, steps + 1):
        if step < state.due:
            continue
        pays, state = look(
            state, frequency, threshold, step, reserved, 1 - 2 * GIB / max(reserved, 1)
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
    assert not look(Periodic(10, 10), 10, 0.0, 10, 8 * GIB, 0.0)[0]


def test_a_spike_after_useless_clearings_is_given_back_and_looked_for_often_again():
    state = Periodic(gap=640, due=1000, after=2 * GIB, returned=8 * GIB)
    pays, state = look(state, 10, 0.5, 1000, 5 * GIB, 0.6)
    assert pays
    assert state.due == 1010


@given(st.floats(1e-6, 10), st.integers(1, 1000))
def test_clearing_takes_one_percent_of_the_time_at_most(cost, times):
    now, spent = 0.0, 0.0
    last, last_cost = float("-inf"), 0.0
    for _ in range(times):
        now += 1.0
        if is_affordable(now - last, last_cost):
            spent, last, last_cost = spent + cost, now, cost
    # the first one is free
    assert spent - cost <= 0.0101 * now + 1e-9
