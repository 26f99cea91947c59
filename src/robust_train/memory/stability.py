"""Whether an attempt's memory is stable, grows or fragments, from its samples.

Memory rises and falls within each step, jumps when a checkpoint is written, and needs some steps to
settle, so neither its mean nor its peak shows a leak; the floor does. See :func:`stability`.
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

_Point = tuple[float, float]


@dataclass(frozen=True)
class Stability:
    """What the samples of one attempt show."""

    kind: str  # `stable`, `growing`, `fragmenting` or `unknown`
    sentence: str  # the same for people, with figures
    mib_per_100_steps: float | None = None  # how fast it grows, None unless it does


def attempt_stability(run_dir: Path, attempt: int) -> Stability | None:
    """Return and log :func:`stability` of one attempt of a run folder; None without samples."""
    samples = [s for s in read_samples(run_dir / FILE_NAME) if s.attempt == attempt]
    if not samples:
        return None
    found = stability(samples)
    if found.kind not in ("unknown", "stable"):  # no news: the summary has them
        log.warning("attempt %d: memory is %s", attempt, found.sentence)
    return found


def stability(samples: Sequence[Sample]) -> Stability:
    """Return whether the memory of the last attempt in ``samples`` is stable.

    Where the attempt used a GPU, tensors that accumulate are a leak, and memory that the caching
    allocator accumulates although tensors do not is fragmentation. The process's own host memory
    counts on the CPU and on the GPU.

    The steps after the warm-up are cut into windows, the least of each window is taken, and a line
    is laid through these floors with the Theil-Sen estimator, the median of the slopes between all
    pairs: nearly three tenths of the points may be off without moving it (Sen 1968, J. Am. Stat.
    Assoc. 63, 1379-1389). A leak is a line that rises in each third of the time, which a jump to
    another level does not, and by more than the floors scatter around it.
    """
    own = [s for s in samples if s.attempt == samples[-1].attempt and s.step is not None]
    own.sort(key=lambda sample: sample.step or 0)
    if not own:
        reason = "the trainer reported no steps" if samples else "no samples"
        return Stability("unknown", f"unknown ({reason})")
    on_gpu = any(sample.allocated is not None for sample in own)
    allocated = _floors(own, lambda sample: sample.allocated)
    host = _floors(own, _host)
    if not (allocated if on_gpu else host):
        return Stability("unknown", "unknown (too few samples after the warm-up)")
    if slope := _growth(allocated, _GPU_BYTES):
        return _growing(slope, "growing", "leak suspected: ")
    if slope := _growth(_floors(own, lambda sample: sample.reserved), _GPU_BYTES):
        return _growing(slope, "fragmenting", "reserved but not in use: ")
    if slope := _growth(host, _HOST_BYTES):
        return _growing(slope, "growing", f"leak suspected: {'host memory ' if on_gpu else ''}")
    return Stability("stable", "stable")


def _host(sample: Sample) -> int | None:
    # a data set that is mapped into memory makes `resident` grow as it is read
    return sample.resident if sample.anonymous is None else sample.anonymous


def _growing(slope: float, kind: str, what: str) -> Stability:
    # rounded before it is put into words, so that sentence and figure agree to the last digit
    rate = round(slope * 100 / MIB, 3)
    return Stability(kind, f"{kind} ({what}{rate:+.1f} MiB per 100 steps)", rate)


def _floors(samples: Sequence[Sample], value: Callable[[Sample], int | None]) -> list[_Point]:
    """Return step and value of the least of each window of steps after the warm-up. Empty where the
    samples are too few."""
    known: list[_Point] = []
    for sample in samples:
        size = value(sample)
        if size is not None and sample.step is not None:
            known.append((sample.step, size))
    if not known:
        return []
    first, last = known[0][0], known[-1][0]
    begin = first + _WARM_UP_SHARE * (last - first)
    settled = [point for point in known if point[0] > begin]
    windows = min(len(settled) // _SAMPLES_A_WINDOW, _MOST_WINDOWS)
    if windows < _FEWEST_WINDOWS:
        return []
    width = (last - begin) / windows
    lowest: dict[int, _Point] = {}
    for point in settled:
        window = min(int((point[0] - begin) / width), windows - 1)
        lowest[window] = min(lowest.get(window, point), point, key=lambda one: one[1])
    floors = [lowest[window] for window in sorted(lowest)]
    return floors if len(floors) >= _FEWEST_WINDOWS else []


def _growth(floors: Sequence[_Point], least_bytes: float) -> float | None:
    """Return the bytes a step by which the floors rise; None where they do not, or hardly."""
    if not floors:
        return None
    slope = _theil_sen(floors)
    steps = floors[-1][0] - floors[0][0]
    level = median(value - slope * step for step, value in floors)
    scatter = median(abs(value - slope * step - level) for step, value in floors)
    least = max(least_bytes, _SHARE * median(v for _, v in floors), _SCATTER * scatter)
    third = len(floors) // 3
    thirds = (floors[:third], floors[third:-third], floors[-third:])
    if slope * steps < least or min(map(_theil_sen, thirds)) < _OF_THE_WHOLE * slope:
        return None
    return slope


def _theil_sen(points: Sequence[_Point]) -> float:
    """Return the median of the slopes between all pairs of points, all at different steps."""
    return median((b - a) / (y - x) for (x, a), (y, b) in combinations(points, 2))
