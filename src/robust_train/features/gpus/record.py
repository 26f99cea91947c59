"""The fields of an attempt's record about the GPU on which it failed."""

from __future__ import annotations

from dataclasses import dataclass

from robust_train.model.attempt import Note


@dataclass(frozen=True)
class GpusNote(Note):
    """Free memory of the GPU on which an attempt failed, in bytes, or None if unknown."""

    behind = "exit"

    gpu_free_before_bytes: int | None = None  # before the attempt
    gpu_free_after_bytes: int | None = None  # after the attempt's process had ended
