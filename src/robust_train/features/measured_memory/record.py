"""What the record of an attempt says of the memory that it held on its GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from robust_train.model.attempt import Note


@dataclass(frozen=True)
class MeasuredMemoryNote(Note):
    """The peak that NVML has shown, known at the end of the attempt."""

    behind = "peak_memory_bytes"

    # all its processes on the GPU where they held most; None if unknown
    gpu_peak_bytes: int | None = None
