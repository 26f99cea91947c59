"""The event and the field of an attempt's record about slow training."""

from __future__ import annotations

from dataclasses import dataclass

from robust_train.model.attempt import Attempt, Note
from robust_train.model.events import Event, Notice


@dataclass(frozen=True)
class Slow(Event):
    """A cause that has cost this ``share`` of the time for ten minutes. Empty once it is over."""

    name = "slow"
    what: str = ""  # `data`, `rank N`, `GPU N`, or `process PID`
    text: str = ""  # a sentence
    share: float = 0.0

    def notice(self, attempt: int | None) -> Notice | None:
        """Return a message about the cause, or None once it is over."""
        return Notice("slow", f" is slow: {self.text}") if self.text else None


@dataclass(frozen=True)
class SlowNote(Note):
    """The hindrance that slows an attempt down."""

    behind = "micro_batch"
    folds = (Slow,)

    slow: str = ""  # the current cause, a sentence

    def after(self, event: Event, attempt: Attempt) -> SlowNote:
        """Return the note with the current cause."""
        return SlowNote(event.text) if isinstance(event, Slow) else self
