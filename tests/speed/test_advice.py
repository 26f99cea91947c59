"""Advice where data, a rank or the machine slows a job down."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attempts import built
from robust_train.model.attempt import Attempt
from robust_train.model.spec import AttemptSpec, Speed
from robust_train.report.wording import speed_advice, speed_text

FAST = Speed(1000, 0.2, 0.3, 320.0)
SLOWER = replace(FAST, rank=1, seconds_per_step=0.25, data_share=0.1)
STEP = "samples/s while training, 0.2 s a step (median; 95 %: 0.3 s)"


def alone(*seconds, **more):
    """Ranks that compute this long in a step until they meet."""
    pairs = enumerate(seconds)
    return [replace(FAST, rank=rank, seconds_alone_per_step=s, **more) for rank, s in pairs]


WAITED = "21 % of the time: raise training.num_workers (now 2)"
SLOW = "rank 2 is slow: 0.3 s a step until the ranks meet, the others 0.2 s"


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([], None),
        ([FAST], None),
        ([replace(FAST, data_share=0.21)], WAITED),
        ([replace(FAST, data_share=0.2)], None),
        ([replace(FAST, data_share=0.9, steps=20)], None),
        ([replace(FAST, between_share=0.97)], None),
        (alone(0.2, 0.21, 0.3, 0.2), SLOW),
        (alone(0.2, 0.2, 0.2, 0.2), None),
        (alone(0.2, 0.21, 0.3, 0.2, steps=50), None),
    ],
)
def test_known_costs_are_named_with_their_remedy(ranks, said):
    """Only large costs are named."""
    attempt = built(Attempt, 1, built(AttemptSpec, (), 4, 1, num_workers=2), speed=tuple(ranks))
    advice = tuple(speed_advice([attempt]))
    assert advice == () if said is None else said in advice[0]


@pytest.mark.parametrize(
    ("speed", "ranks", "text"),
    [
        ([], 1, ""),
        ([replace(FAST, samples_per_second=None)], 1, "0.2 s a step (median; 95 %: 0.3 s)"),
        ([Speed(1000, 4.6e-5, 0.0021, None)], 1, "46 µs a step (median; 95 %: 0.0021 s)"),
        ([replace(FAST, between_share=0.97)], 1, f"320 {STEP}, 97 % between steps"),
        ([FAST, SLOWER], 2, f"640 {STEP.replace('0.2', '0.25')}, 10 % waiting for data"),
        # of a script's ranks only the first reports
        ([FAST], 4, f"1,280 {STEP}"),
    ],
)
def test_the_figures_in_short(speed, ranks, text):
    assert speed_text(speed, ranks) == text
