"""Encodes and reads samples of an attempt's memory, and decides whether its memory is stable.

The attempt's process writes the samples to ``memory.jsonl``. After the attempt, the launcher and
the report read them to find leaks and fragmentation.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from robust_train.files import json_lines
from robust_train.model.json import MalformedEventError, from_json
from robust_train.readable import MIB

log = logging.getLogger("robust_train")

FILE_NAME = "memory.jsonl"


@dataclass(frozen=True)
class Sample:
    """Memory at one moment of an attempt. A field is None if it is unknown or does not apply."""

    time: float  # seconds since the epoch
    attempt: int  # number of the attempt
    device: str  # the attempt's device: `cpu`, or `cuda:<index>` by NVML's index
    step: int | None = None  # last optimizer step that was reported
    allocated: int | None = None  # bytes of this process's tensors on the GPU
    reserved: int | None = None  # bytes that this process's caching allocator holds
    gpu_used: int | None = None  # bytes in use on the whole GPU, by all processes
    gpu_total: int | None = None  # size of the GPU's memory, in bytes
    resident: int | None = None  # bytes of host memory of this process
    # The part of `resident` without mapped files and without memory shared with other processes.
    anonymous: int | None = None


def encode(sample: Sample) -> str:
    """Return the sample as a line of the file, without the line break."""
    fields = {name: value for name, value in vars(sample).items() if value is not None}
    return json.dumps(fields, separators=(",", ":"))


def read_samples(path: Path) -> list[Sample]:
    """Return the samples in a file, skipping truncated lines. Empty if the file does not exist."""
    samples = []
    with contextlib.suppress(OSError):
        for content in json_lines(path):
            with contextlib.suppress(MalformedEventError):
                samples.append(from_json(Sample, content))
    return samples


# --- stability of memory -----------------------------------------------------------------------

# This share of the steps is left out at the start, while memory settles.
_WARM_UP_SHARE = 0.2
# The other steps are divided into six spans of at least five samples each.
_SPANS = 6
_SAMPLES_A_SPAN = 5
# Memory grows if it rises in each third of the steps, by at least this share of the mean slope.
_OF_THE_SLOPE = 0.25
# Smaller growth does not count: a share of the memory, and a number of bytes.
_SHARE = 0.01
_GPU_BYTES = 1 * MIB
# The heap of a healthy interpreter grows by some ten MiB in its first minutes, because libraries
# fill caches and log files are buffered.
_HOST_BYTES = 64 * MIB


@dataclass(frozen=True)
class Stability:
    """Whether the memory of an attempt was stable, according to its samples."""

    kind: str  # `stable`, `growing`, `fragmenting` or `unknown`
    sentence: str  # the result for people, with figures
    mib_per_100_steps: float | None = None  # the rate of growth, None if memory does not grow


def attempt_stability(run_dir: Path, attempt: int) -> Stability | None:
    """Return the stability of one attempt's memory, and log a warning if it is not stable.

    None if the attempt has no samples.
    """
    samples = [s for s in read_samples(run_dir / FILE_NAME) if s.attempt == attempt]
    if not samples:
        return None
    result = stability(samples)
    if result.kind not in ("unknown", "stable"):
        log.warning("attempt %d: memory is %s", attempt, result.sentence)
    return result


def stability(samples: Sequence[Sample]) -> Stability:
    """Return whether the memory of the last attempt in ``samples`` is stable.

    Memory rises and falls within each step, jumps when a checkpoint is written, and needs some
    steps to settle. So a leak shows neither in its mean nor in its peak, but in its floor. If
    tensors accumulate on a GPU, they leak. If only the caching allocator's memory grows, it is
    fragmented. The process's host memory is checked too, whether it trains on a CPU or a GPU.
    """
    samples_of_attempt = [
        s for s in samples if s.attempt == samples[-1].attempt and s.step is not None
    ]
    if not samples_of_attempt:
        reason = "the trainer reported no steps" if samples else "no samples"
        return Stability("unknown", f"unknown ({reason})")
    samples_of_attempt.sort(key=lambda sample: sample.step or 0)
    on_gpu = any(sample.allocated is not None for sample in samples_of_attempt)
    allocated = _floors([(s.step, s.allocated) for s in samples_of_attempt])
    reserved = _floors([(s.step, s.reserved) for s in samples_of_attempt])
    # `resident` grows while a mapped data set is read, so `anonymous` is preferred.
    host = _floors(
        [(s.step, s.resident if s.anonymous is None else s.anonymous) for s in samples_of_attempt]
    )
    if not (allocated if on_gpu else host):
        return Stability("unknown", "unknown (too few samples after the warm-up)")
    where = "host memory " if on_gpu else ""
    for floors, least, kind, what in (
        (allocated, _GPU_BYTES, "growing", "leak suspected: "),
        (reserved, _GPU_BYTES, "fragmenting", "reserved but not in use: "),
        (host, _HOST_BYTES, "growing", f"leak suspected: {where}"),
    ):
        slope = _slope(floors, least)
        if slope:
            # Rounded first, so that the figure and the sentence agree to the last digit.
            rate = round(slope * 100 / MIB, 3)
            text = f"{kind} ({what}{rate:+.1f} MiB per 100 steps)"
            return Stability(kind, text, rate)
    return Stability("stable", "stable")


def _floors(samples: Sequence[tuple[int | None, int | None]]) -> list[tuple[int, int]]:
    """Return the memory's floor in each span of the steps after the warm-up.

    The floor is the tenth percentile instead of the minimum, because the last sample is often too
    low.

    Returns:
        Pairs of memory and step, or an empty list if a span has too few samples.
    """
    sized = [(step, size) for step, size in samples if step is not None and size is not None]
    spans: list[list[tuple[int, int]]] = [[] for _ in range(_SPANS)]
    first, last = (sized[0][0], sized[-1][0]) if sized else (0, 0)
    begin = first + _WARM_UP_SHARE * (last - first)
    for step, size in sized:
        if step > begin:
            span = int(_SPANS * (step - begin) / (last - begin))
            spans[min(span, _SPANS - 1)].append((size, step))
    if min(map(len, spans)) < _SAMPLES_A_SPAN:
        return []
    return [sorted(span)[len(span) // 10] for span in spans]


def _slope(floors: Sequence[tuple[int, int]], least_bytes: float) -> float:
    """Return the bytes per step by which the floors rise, or 0 if they hardly rise.

    With a leak, the floors rise in each third of the steps. If memory only jumps to another level,
    for example because of a larger batch, they rise in one or two thirds.
    """
    if not floors:
        return 0.0
    (low, first) = floors[0]
    (high, last) = floors[-1]
    slope = (high - low) / (last - first)
    rises = [
        after - before >= _OF_THE_SLOPE * slope * (ended - began)
        for (before, began), (after, ended) in zip(floors[::2], floors[1::2], strict=True)
    ]
    is_large = high - low >= max(least_bytes, _SHARE * low)
    return slope if is_large and all(rises) else 0.0
