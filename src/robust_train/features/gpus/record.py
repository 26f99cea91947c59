"""The fields of an attempt's record about the GPU on which it failed.

The launcher sets them. The remedies for a lack of memory compare the two figures: if less memory is
free after the attempt than before, other processes took it.
"""

from __future__ import annotations

from dataclasses import dataclass

from robust_train.model.attempt import Note


@dataclass(frozen=True)
class GpusNote(Note):
    """Free memory of the GPU on which an attempt failed, in bytes. None if unknown."""

    written_after = "exit"

    gpu_free_before_bytes: int | None = None  # before the attempt
    gpu_free_after_bytes: int | None = None  # after the attempt's process had ended
