"""The events and the note of an attempt that makes no progress.

:mod:`.launcher` sends the events in the launcher's process. The report reads the note to count the
time as lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from robust_train.model.attempt import Attempt, Note
from robust_train.model.events import Event, Notice
from robust_train.readable import duration


@dataclass(frozen=True)
class StallWarning(Event):
    """The attempt has made no progress for ``seconds``, which is half of ``limit_seconds``."""

    name = "no_progress"
    seconds: float
    limit_seconds: float

    def notice(self, attempt: int | None) -> Notice:
        """Return a warning."""
        text = (
            f" has made no progress for {duration(self.seconds)} in attempt {attempt}, which is "
            f"ended after {duration(self.limit_seconds)}"
        )
        return Notice("stalled", text)


@dataclass(frozen=True)
class Stalled(Event):
    """The attempt made no progress for ``seconds``, so the launcher ends it. ``stacks`` has the
    stacks of its threads."""

    name = "stalled"
    seconds: float
    stacks: str = ""  # the stacks of its threads

    def notice(self, attempt: int | None) -> Notice:
        """Return the notice that the attempt is ended."""
        return Notice("stalled", f" made no progress in attempt {attempt}: the attempt is ended")


@dataclass(frozen=True)
class StallNote(Note):
    """The seconds without progress after which an attempt was ended. Not written to any file."""

    folds = (Stalled,)

    stalled_seconds: float = 0.0

    def after(self, event: Event, attempt: Attempt) -> StallNote:
        """Return the note after the attempt was ended."""
        if isinstance(event, Stalled):
            return StallNote(event.seconds)
        return self
