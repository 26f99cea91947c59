"""When the CUDA cache is emptied during training."""

from __future__ import annotations

import errno
import mmap

from hypothesis import given
from hypothesis import strategies as st

from robust_train.attempt.memory_upkeep import AllocRetries, CacheChecks, Reserve


def emptied(steps: int, frequency: int, threshold: float, comes_back: bool) -> list[int]:
    """Steps at which a run empties its cache whose tensors hold 2 GiB and whose steps need 8 more,
    once, or time and again."""
    checks, unused_share, done = CacheChecks(frequency, threshold), 0.8, []
    for step in range(steps + 1):
        if checks.is_due(step) and checks.check(step, unused_share):
            done.append(step)
            unused_share = 0.8 if comes_back else 0.0
    return done


@given(st.integers(1, 200), st.floats(0, 0.8))
def test_memory_that_training_takes_again_is_returned_ever_more_rarely(frequency, threshold):
    assert len(emptied(100_000, frequency, threshold, comes_back=True)) <= 18


@given(st.integers(1, 200), st.floats(0, 0.8))
def test_memory_that_training_does_not_take_again_is_returned_once(frequency, threshold):
    assert emptied(2000, frequency, threshold, comes_back=False) == [frequency]


@given(st.floats(0.81, 1))
def test_below_the_threshold_nothing_is_returned(threshold):
    assert emptied(2000, 10, threshold, comes_back=True) == []


def test_memory_that_is_all_in_use_is_left_alone_whatever_the_threshold():
    assert not CacheChecks(10, 0.0).check(10, 0.0)


def test_after_useless_clearings_a_check_that_finds_little_makes_checks_frequent_again():
    checks = CacheChecks(10, 0.5, first=10)
    for number in (10, 30, 70):
        assert checks.is_due(number)
        assert checks.check(number, 0.8)
    assert not checks.is_due(149)
    assert not checks.check(150, 0.1)
    assert checks.is_due(160)


def test_a_reserve_gives_its_memory_up_once_and_can_be_held_again(monkeypatch):
    reserve = Reserve()
    for _ in range(2):
        reserve.hold()
        reserve.hold()
        reserve.release()
        reserve.release()

    def refuses(*arguments, **named):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuses)
    reserve.hold()
    reserve.release()


def test_memory_is_tight_when_two_steps_in_a_row_had_to_empty_the_cache():
    counts = [7, 7, 8, 8, 9, 11, 12, 12]  # what was before the first step is not the step's
    state, tight = AllocRetries(), []
    for count in counts:
        state = state.after_step(count)
        tight.append(state.is_tight)
    assert tight == [False, False, False, False, False, True, True, False]
