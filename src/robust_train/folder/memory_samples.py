"""Memory over time, as the run folder has it: an attempt's samples, and whether they are stable."""

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
    """Memory at a moment of an attempt. Fields are None if unknown or absent."""

    time: float  # seconds since the epoch
    attempt: int  # number of the attempt
    # what the attempt trains on, `cpu` or `cuda:<index>` as NVML counts
    device: str
    step: int | None = None  # last optimizer step that was reported
    # bytes of tensors on the GPU, of this process
    allocated: int | None = None
    # bytes that this process's caching allocator holds
    reserved: int | None = None
    # bytes in use on the whole GPU, by all processes
    gpu_used: int | None = None
    gpu_total: int | None = None  # bytes that the GPU has
    resident: int | None = None  # bytes of host memory of this process
    # those of `resident` that are its own: no files mapped into memory, nothing shared with other
    # processes
    anonymous: int | None = None


def encode(sample: Sample) -> str:
    """Return the sample as a line of the file, without its end."""
    fields = {name: value for name, value in vars(sample).items() if value is not None}
    return json.dumps(fields, separators=(",", ":"))


def read_samples(path: Path) -> list[Sample]:
    """Return the samples of a file in its order, skipping truncated lines. Empty without a file."""
    samples = []
    with contextlib.suppress(OSError):
        for content in json_lines(path):
            with contextlib.suppress(MalformedEventError):
                samples.append(from_json(Sample, content))
    return samples


# --- is it stable? ---

_WARM_UP_SHARE = 0.2
_SPANS = 6
_SAMPLES_A_SPAN = 5
_OF_THE_SLOPE = 0.25
_SHARE = 0.01
_GPU_BYTES = 1 * MIB
# a healthy interpreter's heap, with libraries' caches and log files' buffers, still grows by
# some ten MiB in its first minutes
_HOST_BYTES = 64 * MIB


@dataclass(frozen=True)
class Stability:
    """Whether the memory of an attempt was stable, according to its samples."""

    kind: str  # `stable`, `growing`, `fragmenting` or `unknown`
    sentence: str  # the same for people, with figures
    # how fast it grows, None unless it does
    mib_per_100_steps: float | None = None


def attempt_stability(run_dir: Path, attempt: int) -> Stability | None:
    """Return and log `stability` of one attempt of a run folder, or None without samples."""
    samples = [s for s in read_samples(run_dir / FILE_NAME) if s.attempt == attempt]
    if not samples:
        return None
    result = stability(samples)
    if result.kind not in ("unknown", "stable"):  # the summary has these
        log.warning("attempt %d: memory is %s", attempt, result.sentence)
    return result


def stability(samples: Sequence[Sample]) -> Stability:
    """Return whether the memory of the last attempt in ``samples`` is stable.

    Memory rises and falls within each step, jumps when a checkpoint is written, and needs some
    steps to settle, so neither its mean nor its peak shows a leak, but its floor does. On a GPU,
    tensors that accumulate are a leak, and memory that the caching allocator accumulates although
    tensors do not is fragmentation. The process's own host memory counts on the CPU and on the GPU.
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
    # a data set that is mapped into memory makes `resident` grow as it is read
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
            # rounded before it is put into words, so that both agree to the last digit
            rate = round(slope * 100 / MIB, 3)
            text = f"{kind} ({what}{rate:+.1f} MiB per 100 steps)"
            return Stability(kind, text, rate)
    return Stability("stable", "stable")


def _floors(samples: Sequence[tuple[int | None, int | None]]) -> list[tuple[int, int]]:
    """Return step and value of the floor of each sixth of the steps after the warm-up, empty if a
    sixth has too few samples. A tenth of the samples may lie below: the last sample often does."""
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
    """Return the bytes a step by which the floors rise, or 0 if they do not, or hardly.

    A leak rises in each third of the time. A jump to another level, such as after a larger batch,
    rises in only one or two thirds.
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
