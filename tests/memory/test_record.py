"""Which samples are kept of an attempt that runs for a week."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from robust_train.memory.samples import Limits, Sample, thinned

LIMITS = Limits(first=5, between=12, newest=4, slack=6)


def recorded(samples: list[Sample], limits: Limits = LIMITS) -> list[Sample]:
    kept: list[tuple[int, Sample]] = []
    for numbered in enumerate(samples):
        kept.append(numbered)
        if len(kept) >= limits.most:
            kept = thinned(kept, limits)
            assert len(kept) <= limits.first + limits.between + limits.newest
    return [sample for _, sample in kept]


def attempt(count: int, first_step_at: int, gap: float = 0.1) -> list[Sample]:
    return [
        Sample(
            time=1e9 + gap * number,
            attempt=1,
            device="cpu",
            step=None if number < first_step_at else number,
        )
        for number in range(count)
    ]


@settings(max_examples=60)
@given(st.integers(1, 400), st.integers(0, 60), st.floats(0.001, 1000))
def test_the_first_steps_and_the_newest_samples_are_all_there(count, first_step_at, gap):
    samples = attempt(count, first_step_at, gap)
    kept = recorded(samples)
    assert kept[-min(count, LIMITS.newest) :] == samples[-min(count, LIMITS.newest) :]
    training = [sample for sample in samples if sample.step is not None][: LIMITS.first]
    assert [sample for sample in training if sample not in kept] == []
    assert kept == sorted(kept, key=lambda sample: sample.time)
    assert len(set(kept)) == len(kept)


@settings(max_examples=60)
@given(st.lists(st.floats(0, 1e9), max_size=120))
def test_a_clock_that_jumps_does_not_make_it_grow(times):
    samples = [Sample(time=at, attempt=1, device="cpu", step=0) for at in times]
    recorded(samples)  # checks the bound at each sample


def test_a_week_is_spread_evenly():
    limits = Limits(first=20, between=100, newest=20, slack=50)
    samples = attempt(60_000, 0, gap=10.0)
    kept = recorded(samples, limits)
    assert len(kept) > limits.first + limits.between / 2 + limits.newest
    gaps = [b.time - a.time for a, b in itertools.pairwise([*kept, samples[-1]])]
    week = samples[-1].time - samples[0].time
    assert max(gaps) < 2.1 * week / limits.between
