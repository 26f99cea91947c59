"""The event and the field of an attempt's record about slow training."""

from __future__ import annotations

from dataclasses import dataclass

from robust_train.model.attempt import Attempt, Note
from robust_train.model.events import Event, Notice


@dataclass(frozen=True)
class Slow(Event):
    """A cause that cost this ``share`` of the time for ten minutes. All fields are empty once
    training is no longer slow."""

    name = "slow"
    what: str = ""  # `data`, `rank N`, `GPU N`, or `process PID`
    text: str = ""  # a sentence for people
    share: float = 0.0

    def notice(self, attempt: int | None) -> Notice | None:
        """Return a message about the cause, or None once training is no longer slow."""
        return Notice("slow", f" is slow: {self.text}") if self.text else None


@dataclass(frozen=True)
class SlowNote(Note):
    """The cause that slows an attempt down now."""

    behind = "micro_batch"
    folds = (Slow,)

    slow: str = ""  # the cause as a sentence, empty if training is not slow

    def after(self, event: Event, attempt: Attempt) -> SlowNote:
        """Return the note with the current cause."""
        if isinstance(event, Slow):
            return SlowNote(event.text)
        return self
