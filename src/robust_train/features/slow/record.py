"""The field of an attempt's record about slow training."""

from __future__ import annotations

from dataclasses import dataclass

from robust_train.model.attempt import Attempt, Note
from robust_train.model.events import Event, Slow


@dataclass(frozen=True)
class SlowNote(Note):
    """The hindrance that slows an attempt down."""

    behind = "micro_batch"
    folds = (Slow,)

    slow: str = ""  # what slows it down now, a sentence

    def after(self, event: Event, attempt: Attempt) -> SlowNote:
        """Return the note with what slows the attempt down by now."""
        return SlowNote(event.text) if isinstance(event, Slow) else self
