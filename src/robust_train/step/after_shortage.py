"""Decide how a step continues after memory ran out in a part of it. Pure.

In the process that trains, :class:`.part_runner.PartRunner` checks the first two cases itself, and
calls :func:`decide` for the others. Then it acts on the answer:

    a part runs ──went through──────────────────────────────▶ the next part
        │
        └─ memory ran out
             ├─ the step cannot be undone ──────────────────────▶ CANNOT_REPEAT, the attempt ends
             ├─ gradients of earlier batches can leave the GPU ─▶ REPEAT_WITH_ROOM, same size
             ├─ a smaller size is left ─────────────────────────▶ REPEAT_SMALLER
             ├─ a smaller size would leave a lone sample ───────▶ CANNOT_REPEAT, the attempt ends
             └─ no smaller size is left ────────────────────────▶ EXHAUSTED, the attempt ends

With several ranks, the rank whose memory ran out reports its answer, and the other ranks repeat the
step or end with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from robust_train.step.splitting import bounds


class Answer(Enum):
    """How a step continues after memory ran out in a part."""

    REPEAT_WITH_ROOM = "the step is repeated at the same size"
    REPEAT_SMALLER = "the step is repeated in smaller parts"
    CANNOT_REPEAT = "the attempt ends, because the step cannot be repeated"
    EXHAUSTED = "the attempt ends, because no smaller size is left"


@dataclass(frozen=True)
class AfterShortage:
    """The answer, with the reason if the step cannot be repeated."""

    answer: Answer
    reason: str = ""

    @property
    def repeats(self) -> bool:
        """Whether the step runs again."""
        return self.answer in (Answer.REPEAT_WITH_ROOM, Answer.REPEAT_SMALLER)

    @property
    def shrinks(self) -> bool:
        """Whether the size in use was too large, so that smaller parts are used from now on."""
        return self.answer in (Answer.REPEAT_SMALLER, Answer.EXHAUSTED)


def decide(smaller: int | None, used: int, batches: Iterable[int], *, least: int) -> AfterShortage:
    """Return how a step that can be undone continues.

    Args:
        smaller: the next smaller size, in samples, or None if no smaller size is left.
        used: the size at which memory ran out.
        batches: the number of samples of each batch of the step.
        least: the fewest samples that a part may have.
    """
    if smaller is None:
        return AfterShortage(Answer.EXHAUSTED)
    if not all(_can_shrink(samples, smaller, used, least) for samples in batches):
        reason = "BatchNorm cannot take a lone sample, which smaller parts would have"
        return AfterShortage(Answer.CANNOT_REPEAT, reason)
    return AfterShortage(Answer.REPEAT_SMALLER)


def _can_shrink(samples: int, smaller: int, used: int, least: int) -> bool:
    """Return whether every part of a batch has fewer than ``used`` samples at the smaller size."""
    if samples < used:
        return True
    parts = bounds(samples, smaller, least=least)
    return max(stop - start for start, stop in parts) < used
