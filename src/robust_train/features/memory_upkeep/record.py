"""The field of an attempt's record about the memory that its last clean-up returned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from robust_train.model.attempt import Attempt, Note
from robust_train.model.events import Event, MemoryCleared
from robust_train.model.json import Json


@dataclass(frozen=True)
class UpkeepNote(Note):
    """The figures of an attempt's final clean-up."""

    behind = "memory"
    folds = (MemoryCleared,)

    memory_returned: Mapping[str, Json] | None = None

    def after(self, event: Event, attempt: Attempt) -> UpkeepNote:
        """Return the note with the figures of a clean-up at the end."""
        match event:
            case MemoryCleared(reason="end" | "failure"):
                return UpkeepNote(event.figures)
        return self
