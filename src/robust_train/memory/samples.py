"""Memory over time, as a run folder keeps it: ``memory.jsonl``, one line for each sample."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

FILE_NAME = "memory.jsonl"


@dataclass(frozen=True)
class Sample:
    """Memory at one moment of an attempt; None for what was not known or is not there.

    Attributes:
        time: seconds since the epoch.
        attempt: number of the attempt.
        device: what the attempt trains on, ``cpu`` or ``cuda:<index>`` as NVML counts.
        step: last optimizer step that was reported.
        allocated: bytes of tensors on the GPU, of this process.
        reserved: bytes that this process's caching allocator holds.
        gpu_used: bytes in use on the whole GPU, by everybody.
        gpu_total: bytes that the GPU has.
        resident: bytes of host memory of this process.
        anonymous: those of ``resident`` that are its own: no files mapped into memory, nothing
            shared with other processes.
    """

    time: float
    attempt: int
    device: str
    step: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    gpu_used: int | None = None
    gpu_total: int | None = None
    resident: int | None = None
    anonymous: int | None = None


def encode(sample: Sample) -> str:
    """The sample as a line of the file, without its end."""
    known = {name: value for name, value in vars(sample).items() if value is not None}
    return json.dumps(known, separators=(",", ":"))


_NAMES = frozenset(item.name for item in fields(Sample))


def read_samples(path: Path) -> list[Sample]:
    """The samples of a file in its order; none where there is no file, torn lines are skipped."""
    if not path.is_file():
        return []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return []
    samples = []
    for line in lines:
        try:
            values = json.loads(line)
            samples.append(Sample(**{k: v for k, v in values.items() if k in _NAMES}))
        except (ValueError, TypeError, AttributeError):
            continue
    return samples
