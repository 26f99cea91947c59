"""What the record of an attempt says of the search for its micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from robust_train.model.attempt import Attempt, Note
from robust_train.model.events import BatchSizeFound, Event
from robust_train.model.json import Json


@dataclass(frozen=True)
class BatchSearchNote(Note):
    """What probes before training have found."""

    behind = "micro_batch"

    batch_size_found: Mapping[str, Json] | None = None

    def after(self, event: Event, attempt: Attempt) -> BatchSearchNote:
        """Return the note with the figures of the search."""
        return BatchSearchNote(event.figures) if isinstance(event, BatchSizeFound) else self
