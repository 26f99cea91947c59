"""The fields of an attempt's record about its memory over time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from robust_train.model.attempt import Note
from robust_train.model.json import Json


@dataclass(frozen=True)
class StabilityNote(Note):
    """Whether the memory of an attempt was stable. The launcher sets it after the attempt."""

    behind = "peak_memory_bytes"

    memory_stability: Mapping[str, Json] | None = None
