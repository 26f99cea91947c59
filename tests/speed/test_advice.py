"""Advice where data, a rank or the machine slows a job down."""

from __future__ import annotations

from dataclasses import replace

import pytest

from robust_train.model.attempt import Attempt
from robust_train.model.spec import AttemptSpec, Speed
from robust_train.report.wording import speed_advice, speed_text

FAST = Speed(1000, 0.2, 0.3, 320.0)


def advice(*speed: Speed) -> tuple[str, ...]:
    return speed_advice([Attempt(1, AttemptSpec((), 4, 1, num_workers=2), speed=speed)])


def test_nothing_is_advised_where_nothing_is_known():
    assert advice() == ()
    assert advice(FAST) == ()


@pytest.mark.parametrize(
    ("share", "steps", "is_advised"), [(0.21, 1000, True), (0.2, 1000, False), (0.9, 20, False)]
)
def test_more_than_20_percent_waiting_for_data_is_told_if_it_cost_anything(
    share, steps, is_advised
):
    found = advice(replace(FAST, data_share=share, steps=steps))
    assert bool(found) == is_advised
    if is_advised:
        assert "21 % of the time" in found[0]
        assert "training.num_workers (now 2)" in found[0]


def test_the_rank_that_makes_the_others_wait_is_named():
    alone = {0: 0.2, 1: 0.21, 2: 0.3, 3: 0.2}
    ranks = [replace(FAST, rank=rank, seconds_alone_per_step=s) for rank, s in alone.items()]
    (sentence,) = advice(*ranks)
    assert "rank 2 is slow: 0.3 s a step until the ranks meet, the others 0.2 s" in sentence
    assert not advice(*(replace(r, seconds_alone_per_step=0.2) for r in ranks))
    assert not advice(*(replace(r, steps=50) for r in ranks)), "too short to matter"


def test_the_figures_in_short():
    assert speed_text((), 1) == ""
    assert (
        speed_text([replace(FAST, samples_per_second=None)], 1)
        == "0.2 s a step (median; 95 %: 0.3 s)"
    )
    unknown = replace(FAST, between_share=0.97)
    assert speed_text([unknown], 1).endswith("97 % between steps")
    assert not advice(unknown), "no one knows what that time went into"
    ranks = [FAST, replace(FAST, rank=1, seconds_per_step=0.25, data_share=0.1)]
    assert speed_text(ranks, 2) == (
        "640 samples/s while training, 0.25 s a step (median; 95 %: 0.3 s), 10 % waiting for data"
    )
    alone = speed_text([FAST], 4)
    assert alone.startswith("1,280 samples/s"), "of a script's ranks only the first reports"
