"""Compares the loss of a part with the losses of its two halves.

:mod:`.split_checker` uses these pure functions in the process that trains. Losses that differ only
by rounding, or by random numbers (dropout), count as equal.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

_LEAST_TOLERANCE = 2e-5
"""Relative difference that counts as rounding in float32 and more exact formats."""

_STANDARD_ERRORS = 5.0
"""A mean difference of up to this many standard errors counts as noise. By chance alone, the mean
of 16 draws exceeds that about once in 6,000 losses."""


@dataclass(frozen=True)
class Losses:
    """The loss of a part, and the losses of its halves with their weights."""

    whole: float
    halves: tuple[float, ...]
    weights: tuple[float, ...]
    # The relative difference that a number format less exact than float32 explains, else 0.
    rounding: float = 0.0
    # The largest term in the sum that makes the loss. A small loss may be the difference of large
    # terms, and then it has their rounding error.
    largest_term: float = 0.0

    @property
    def sum(self) -> float:
        """The weighted sum of the losses of the halves. A half with weight 0 does not count, even
        if its loss is NaN."""
        pairs = zip(self.weights, self.halves, strict=True)
        return math.fsum(weight * loss for weight, loss in pairs if weight)

    @property
    def difference(self) -> float:
        """The absolute difference between the loss of the whole and the sum of the halves."""
        return abs(self.whole - self.sum)

    @property
    def tolerance(self) -> float:
        """The largest difference that counts as rounding."""
        relative = max(_LEAST_TOLERANCE, self.rounding)
        losses = (abs(loss) for loss in (self.whole, *self.halves))
        return relative * max(self.largest_term, *losses)

    @property
    def is_zero(self) -> bool:
        """Whether all losses are 0."""
        return not any((self.whole, *self.halves))

    @property
    def agree(self) -> bool:
        """Whether the whole and its halves have the same loss, except for rounding."""
        return math.isfinite(self.sum) and self.difference <= self.tolerance


def differ_beyond_noise(draws: Sequence[Losses]) -> bool:
    """Return whether the whole and its halves differ by more than their random numbers explain.

    In each draw, the whole and its halves start from the same random numbers. The mean difference
    of all draws is compared with zero, as in a paired t-test.
    """
    differences = [draw.whole - draw.sum for draw in draws]
    if not all(map(math.isfinite, differences)):
        return any(math.isfinite(draw.whole) for draw in draws)
    noise = statistics.stdev(differences) / math.sqrt(len(draws))
    tolerance = max(draw.tolerance for draw in draws)
    return abs(statistics.fmean(differences)) > max(_STANDARD_ERRORS * noise, tolerance)


def mean_of(draws: Sequence[Losses]) -> Losses:
    """Return the mean losses of several draws."""
    whole = statistics.fmean(draw.whole for draw in draws)
    first_half = statistics.fmean(draw.halves[0] for draw in draws)
    second_half = statistics.fmean(draw.halves[1] for draw in draws)
    return replace(draws[0], whole=whole, halves=(first_half, second_half))


def mean_of_ranks(losses: Sequence[float], items: Sequence[float]) -> float:
    """Return the mean of the ranks' losses, weighted by the items of each rank.

    The loss of a rank without items does not count, unless no rank has items.
    """
    if len(losses) == 1 or not any(items):
        return sum(losses) / len(losses)
    pairs = zip(losses, items, strict=True)
    return sum(loss * count for loss, count in pairs if count) / sum(items)


def describe_losses(losses: Losses, samples: int, first: int | None = None) -> str:
    """Describe the losses in a sentence.

    Args:
        losses: the losses of the part and its two pieces.
        samples: the number of samples in the part.
        first: the number of samples in the first piece. None: the pieces are halves.
    """
    first_loss, second_loss = losses.halves
    whole = f"a part of {samples} has loss {losses.whole:.6g}"
    pieces = "its halves"
    if first is not None:
        pieces = f"its first {first} and its other {samples - first} samples"
    text = f"{whole}, {pieces} {first_loss:.6g} and {second_loss:.6g}"
    if max(losses.weights) - min(losses.weights) > 1e-9:
        listed = " and ".join(f"{weight:.3g}" for weight in losses.weights)
        text = f"{text} with weights {listed}"
    return f"{text}, which make {losses.sum:.6g}"
