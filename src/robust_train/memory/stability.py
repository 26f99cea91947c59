"""Whether an attempt's memory is stable, grows or fragments, from its samples.

Memory rises and falls within each step, jumps when a checkpoint is written, and needs some steps to
settle, so neither its mean nor its peak shows a leak; the floor does. See :func:`stability`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from robust_train.memory.samples import FILE_NAME, Sample, read_samples
from robust_train.readable import MIB

log = logging.getLogger("robust_train")

_WARM_UP_SHARE = 0.2
_SPANS = 6
_SAMPLES_A_SPAN = 5
_OF_THE_SLOPE = 0.25
_SHARE = 0.01
_GPU_BYTES = 1 * MIB
_HOST_BYTES = 6 * MIB


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
    if found.kind not in ("unknown", "stable"):  # the summary has these
        log.warning("attempt %d: memory is %s", attempt, found.sentence)
    return found


def stability(samples: Sequence[Sample]) -> Stability:
    """Return whether the memory of the last attempt in ``samples`` is stable.

    On a GPU, tensors that accumulate are a leak, and memory that the caching allocator accumulates
    although tensors do not is fragmentation. The process's own host memory counts on the CPU and on
    the GPU.
    """
    own = [
        s for s in samples if s.attempt == samples[-1].attempt and s.step is not None
    ]
    own.sort(key=lambda sample: sample.step or 0)
    if not own:
        reason = "the trainer reported no steps" if samples else "no samples"
        return Stability("unknown", f"unknown ({reason})")
    on_gpu = any(sample.allocated is not None for sample in own)
    allocated = _floors(own, lambda sample: sample.allocated)
    host = _floors(own, _host)
    if not (allocated if on_gpu else host):
        return Stability("unknown", "unknown (too few samples after the warm-up)")
    if slope := _slope(allocated, _GPU_BYTES):
        return _growing(slope, "growing", "leak suspected: ")
    if slope := _slope(_floors(own, lambda sample: sample.reserved), _GPU_BYTES):
        return _growing(slope, "fragmenting", "reserved but not in use: ")
    if slope := _slope(host, _HOST_BYTES):
        return _growing(
            slope, "growing", f"leak suspected: {'host memory ' if on_gpu else ''}"
        )
    return Stability("stable", "stable")


def _host(sample: Sample) -> int | None:
    # a data set that is mapped into memory makes `resident` grow as it is read
    return sample.resident if sample.anonymous is None else sample.anonymous


def _growing(slope: float, kind: str, what: str) -> Stability:
    # rounded before it is put into words, so that sentence and figure agree to the last digit
    rate = round(slope * 100 / MIB, 3)
    return Stability(kind, f"{kind} ({what}{rate:+.1f} MiB per 100 steps)", rate)


def _floors(
    samples: Sequence[Sample], value: Callable[[Sample], int | None]
) -> list[tuple[int, int]]:
    """Return value and step of the floor of each sixth of the steps after the warm-up; empty if a
    sixth has too few samples. A tenth of the samples may lie below: the last one often does."""
    known: list[tuple[int, int]] = []
    for sample in samples:
        size = value(sample)
        if size is not None and sample.step is not None:
            known.append((size, sample.step))
    if not known:
        return []
    first, last = known[0][1], known[-1][1]
    begin = first + _WARM_UP_SHARE * (last - first)
    spans: list[list[tuple[int, int]]] = [[] for _ in range(_SPANS)]
    for size, step in known:
        if step > begin:
            span = int(_SPANS * (step - begin) / (last - begin))
            spans[min(span, _SPANS - 1)].append((size, step))
    if min(map(len, spans)) < _SAMPLES_A_SPAN:
        return []
    return [sorted(span)[len(span) // 10] for span in spans]


def _slope(floors: Sequence[tuple[int, int]], least_bytes: float) -> float | None:
    """Return the bytes a step by which the floors rise; None if they do not, or hardly.

    A leak rises in each third of the time. A jump to another level, such as a larger batch makes,
    rises in one third or two.
    """
    if not floors:
        return None
    (low, first), (high, last) = floors[0], floors[-1]
    if high - low < max(least_bytes, _SHARE * low):
        return None
    slope = (high - low) / (last - first)
    for (before, began), (after, ended) in zip(floors[::2], floors[1::2], strict=True):
        if after - before < _OF_THE_SLOPE * slope * (ended - began):
            return None
    return slope
