"""When the CUDA cache is emptied during training."""

from __future__ import annotations

import errno
import mmap

from hypothesis import given
from hypothesis import strategies as st

from robust_train.attempt.memory_upkeep import CacheChecks, Reserve


def emptied(steps: int, frequency: int, threshold: float, comes_back: bool) -> list[int]:
    """Steps at which a run empties its cache whose tensors hold 2 GiB and whose steps need 8 more,
    once, or time and again."""
    checks, unused_share, done = CacheChecks(frequency, threshold), 0.8, []
    for step in range(1, steps + 1):
        if checks.empties(lambda share=unused_share: share):
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
    assert not CacheChecks(1, 0.0).empties(lambda: 0.0)


def test_after_useless_clearings_a_check_that_finds_little_makes_checks_frequent_again():
    checks = CacheChecks(10, 0.5)
    shares = {10: 0.8, 30: 0.8, 70: 0.8, 150: 0.1, 160: 0.8}
    seen = []
    for number in range(1, 161):
        checks.empties(lambda number=number: seen.append(number) or shares[number])
    assert seen == list(shares)


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
