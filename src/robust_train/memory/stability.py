"""Whether an attempt's memory stays as it is, grows, or falls to pieces: told from its samples.

Memory rises and falls within each step, jumps when a checkpoint is written, and needs some steps
to settle, so neither its mean nor its peak tells. What a leak moves is the floor. So the steps
after the warm-up are cut into windows, the least of each window is taken, and a line is laid
through these floors with the Theil-Sen estimator, the median of the slopes between all pairs:
nearly three tenths of the points may be off without moving it (Sen 1968, J. Am. Stat. Assoc. 63,
1379-1389). A leak is a line that rises in each third of the time, which a jump to another level
does not, and by more than the floors scatter around it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median

from robust_train.memory.samples import FILE_NAME, Sample, read_samples
from robust_train.values import MIB

log = logging.getLogger("robust_train")

_WARM_UP_SHARE = 0.2
_MOST_WINDOWS = 30
_FEWEST_WINDOWS = 9
_SAMPLES_A_WINDOW = 3
_OF_THE_WHOLE = 0.25
_SCATTER = 4.0
_SHARE = 0.01
_GPU_BYTES = 1 * MIB
_HOST_BYTES = 6 * MIB


@dataclass(frozen=True)
class Stability:
    """What the samples of one attempt tell.

    Attributes:
        kind: ``stable``, ``growing``, ``fragmenting`` or ``unknown``.
        sentence: the same for people, with figures.
        mib_per_100_steps: how fast it grows, None unless it does.
    """

    kind: str
    sentence: str
    mib_per_100_steps: float | None = None


def attempt_stability(run_dir: Path, attempt: int) -> Stability | None:
    """:func:`stability` of one attempt of a run folder, told to the log; None without samples."""
    samples = [s for s in read_samples(run_dir / FILE_NAME) if s.attempt == attempt]
    if not samples:
        return None
    found = stability(samples)
    # a run of a few seconds need not be told that it was one
    level = {"unknown": logging.DEBUG, "stable": logging.INFO}.get(found.kind, logging.WARNING)
    log.log(level, "attempt %d: memory is %s", attempt, found.sentence)
    return found


def stability(samples: Sequence[Sample]) -> Stability:
    """What the samples of one attempt tell of its memory.

    Where the attempt used a GPU: tensors that pile up are a leak; memory that the caching allocator
    piles up although tensors do not is fragmentation. The process's own host memory counts on the
    CPU and on the GPU.

    Args:
        samples: of one attempt; others than the last one's are left out.
    """
    if not samples:
        return _unknown("no samples")
    attempt = samples[-1].attempt
    own = sorted(
        (s for s in samples if s.attempt == attempt and s.step is not None),
        key=lambda sample: sample.step or 0,
    )
    if not own:
        return _unknown("the trainer reported no steps")
    on_gpu = any(sample.allocated is not None for sample in own)
    floors = {
        name: _floors([(s.step, value(s)) for s in own if s.step is not None])
        for name, value in _QUANTITIES.items()
    }
    known = {name: points for name, points in floors.items() if points}
    if ("allocated" if on_gpu else "host") not in known:
        return _unknown("too few samples after the warm-up")
    if slope := _growth(known.get("allocated"), _GPU_BYTES):
        return _growing(slope, "")
    if slope := _growth(known.get("reserved"), _GPU_BYTES):
        rate = _mib_per_100_steps(slope)
        return Stability(
            "fragmenting",
            f"fragmenting (reserved but not in use: {rate:+.1f} MiB per 100 steps)",
            rate,
        )
    if slope := _growth(known.get("host"), _HOST_BYTES):
        return _growing(slope, "host memory " if on_gpu else "")
    return Stability("stable", "stable")


def _host(sample: Sample) -> int | None:
    # a data set that is mapped into memory makes `resident` grow as it is read
    return sample.resident if sample.anonymous is None else sample.anonymous


_QUANTITIES: dict[str, Callable[[Sample], int | None]] = {
    "allocated": lambda sample: sample.allocated,
    "reserved": lambda sample: sample.reserved,
    "host": _host,
}


def _unknown(why: str) -> Stability:
    return Stability("unknown", f"unknown ({why})")


def _growing(slope: float, what: str) -> Stability:
    rate = _mib_per_100_steps(slope)
    sentence = f"growing (leak suspected: {what}{rate:+.1f} MiB per 100 steps)"
    return Stability("growing", sentence, rate)


def _mib_per_100_steps(slope: float) -> float:
    # rounded before it is put into words, so that sentence and figure agree to the last digit
    return round(slope * 100 / MIB, 3)


_Point = tuple[float, float]


def _floors(series: Sequence[tuple[int, int | None]]) -> list[_Point]:
    """The least of each window of steps after the warm-up, with the step where it was seen.

    Empty where the samples are too few to say anything.
    """
    known = [(step, value) for step, value in series if value is not None]
    if not known:
        return []
    first, last = known[0][0], known[-1][0]
    begin = first + _WARM_UP_SHARE * (last - first)
    settled = [(step, value) for step, value in known if step > begin]
    windows = min(len(settled) // _SAMPLES_A_WINDOW, _MOST_WINDOWS)
    if windows < _FEWEST_WINDOWS:
        return []
    width = (last - begin) / windows
    lowest: dict[int, _Point] = {}
    for step, value in settled:
        window = min(int((step - begin) / width), windows - 1)
        if window not in lowest or value < lowest[window][1]:
            lowest[window] = (step, value)
    floors = [lowest[window] for window in sorted(lowest)]
    return floors if len(floors) >= _FEWEST_WINDOWS else []


def _growth(floors: Sequence[_Point] | None, least_bytes: float) -> float | None:
    """Bytes a step by which the floors rise; None where they do not, or hardly."""
    if not floors:
        return None
    slope = _theil_sen(floors)
    steps = floors[-1][0] - floors[0][0]
    level = median(value - slope * step for step, value in floors)
    scatter = median(abs(value - slope * step - level) for step, value in floors)
    least = max(least_bytes, _SHARE * median(v for _, v in floors), _SCATTER * scatter)
    if slope * steps < least:
        return None
    third = len(floors) // 3
    thirds = (floors[:third], floors[third:-third], floors[-third:])
    if min(map(_theil_sen, thirds)) < _OF_THE_WHOLE * slope:
        return None
    return slope


def _theil_sen(points: Sequence[_Point]) -> float:
    """The median of the slopes between all pairs of points, all at different steps."""
    return median((b - a) / (y - x) for (x, a), (y, b) in combinations(points, 2))
