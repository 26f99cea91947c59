"""Chooses which micro-batches a search probes. Pure, called by the attempt's ``step.probing``.

A search looks for the largest micro-batch that fits (``training.batch_size=auto``). It relies on
memory growing linearly with the micro-batch. For example, if a probe with 4 samples takes 1.2 GiB
and a probe with 64 samples takes 4.2 GiB, a sample takes 50 MiB, and 512 samples would take about
26.6 GiB. The search then measures a size just below the limit, since only measured sizes count.
Sizes are samples, memory is bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from robust_train.readable import MIB

MOST_PROBES = 4  # probes of a search
MARGIN = 0.05
"""A size is predicted to fit if it leaves this share of the room free. A measured size may use half
of the margin."""

_FIRST = 4  # samples of the first probe
# The furthest extrapolation from a single probe, in multiples of its samples.
_FARTHEST = 64
# Small allocations of libraries, which hide the activations of a sample.
_NOISE_BYTES = 4 * MIB
_STEP_DOWN = 1.5  # the size is divided by this after memory ran out, if one probe is left
# A size that ran out of memory is assumed to need this multiple of the room.
_BEYOND = 1.05


@dataclass(frozen=True)
class Probe:
    """A size that was tried, and its peak in bytes. The peak is None if memory ran out."""

    batch_size: int
    peak_bytes: int | None


@dataclass(frozen=True)
class Limits:
    """The room for a pass, in bytes."""

    rest_bytes: int = 0  # in use before the pass
    limit_bytes: int = 0  # the most that may be in use during the pass

    def but_for(self, margin: float) -> float:
        """Return the peak that leaves this share of the room free."""
        return self.limit_bytes - margin * max(self.limit_bytes - self.rest_bytes, 0)


def next_size(sizes: Sequence[int], probes: Sequence[Probe], limits: Limits) -> int | None:
    """Return the size to try next, None if another probe would gain nothing.

    Args:
        sizes: the sizes to choose from, smallest first.
        probes: the probes so far, in order.
        limits: the room for each of them.
    """
    if not probes:
        large_enough = [size for size in sizes if size >= _FIRST]
        return large_enough[0] if large_enough else sizes[-1]
    best = largest_that_fits(probes, limits)
    failed = [probe for probe in probes if not fits(probe, limits)]
    low = 0 if best is None else best.batch_size
    high = min((probe.batch_size for probe in failed), default=sizes[-1] + 1)
    between = [size for size in sizes if low < size < high]
    if len(probes) >= MOST_PROBES or not between:
        return None
    if best is None:
        return between[0]
    predict_peak = _fit_line(probes, best, limits)
    expected = [size for size in between if predict_peak(size) <= limits.but_for(MARGIN)]
    if not failed and _is_vague(_probe_below(probes, best, limits), best):
        # Workspaces and noise may hide a sample's share, so grow by a bounded step.
        doubled = [size for size in between if size >= 2 * low]
        next_step = doubled[0] if doubled else between[-1]
        bounded = [size for size in expected if size <= _FARTHEST * low]
        return max([next_step] + bounded)
    largest = expected[-1] if expected else low
    if len(probes) == MOST_PROBES - 1 and probes[-1].peak_bytes is None:
        # The prediction was wrong by an unknown amount, and the last probe must succeed.
        safe = [size for size in between if size <= high / _STEP_DOWN]
        if safe:
            largest = min(largest, safe[-1])
    # A gain of a few percent is not worth a probe.
    return largest if largest > low * (1 + MARGIN) else None


def fits(probe: Probe, limits: Limits) -> bool:
    """Return whether a probe succeeded and left half the margin free."""
    return probe.peak_bytes is not None and probe.peak_bytes <= limits.but_for(MARGIN / 2)


def largest_that_fits(probes: Sequence[Probe], limits: Limits) -> Probe | None:
    """Return the result of a search: the largest size that was tried and fits."""
    good = [probe for probe in probes if fits(probe, limits)]
    return max(good, key=_batch_size, default=None)


def _batch_size(probe: Probe) -> int:
    return probe.batch_size


def _fit_line(probes: Sequence[Probe], best: Probe, limits: Limits) -> Callable[[int], float]:
    """Return a function that predicts the peak of a size from two probes: ``best`` and the next
    larger size, which did not fit. If no larger size was tried, the next smaller size is used."""
    size = best.batch_size
    peak = float(best.peak_bytes or 0)
    above = [probe for probe in probes if probe.batch_size > size]
    if above:
        nearest = min(above, key=_batch_size)
        needed: float = nearest.peak_bytes or 0
        if not needed:
            needed = limits.but_for(1 - _BEYOND)
        return line((nearest.batch_size, needed), (size, peak))
    below = _probe_below(probes, best, limits)
    # Attribute all growth up to this size to its samples, which never underestimates their share.
    noise = _NOISE_BYTES if _is_vague(below, best) else 0
    risen = max(peak - (below.peak_bytes or 0), 0) + noise
    return line((below.batch_size, peak - risen), (size, peak))


def line(first: tuple[int, float], second: tuple[int, float]) -> Callable[[int], float]:
    """Return the straight line through two points, each a size and its peak in bytes."""
    slope = (second[1] - first[1]) / (second[0] - first[0])

    def predict_peak(samples: int) -> float:
        return second[1] + slope * (samples - second[0])

    return predict_peak


def _probe_below(probes: Sequence[Probe], best: Probe, limits: Limits) -> Probe:
    """Return the probe of the next smaller measured size. Without such a probe, return a probe of
    size 0, whose peak is the memory in use before a pass."""
    smaller = [
        probe
        for probe in probes
        if probe.batch_size < best.batch_size and probe.peak_bytes is not None
    ]
    nothing = Probe(0, limits.rest_bytes)
    return max(smaller, key=_batch_size, default=nothing)


def _is_vague(below: Probe, best: Probe) -> bool:
    """Return whether two probes differ only by noise, or only a single size was measured."""
    risen = (best.peak_bytes or 0) - (below.peak_bytes or 0)
    return not below.batch_size or risen < 4 * _NOISE_BYTES
