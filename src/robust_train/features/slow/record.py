"""What the record of an attempt says of slow training."""

from __future__ import annotations

from dataclasses import dataclass

from robust_train.model.attempt import Attempt, Note
from robust_train.model.events import Event, Slow


@dataclass(frozen=True)
class SlowNote(Note):
    """What slows an attempt down."""

    behind = "micro_batch"
    folds = (Slow,)

    slow: str = ""  # what slows it down now, a sentence

    def after(self, event: Event, attempt: Attempt) -> SlowNote:
        """Return the note with what slows the attempt down by now."""
        return SlowNote(event.text) if isinstance(event, Slow) else self
