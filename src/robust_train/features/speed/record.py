"""The fields of an attempt's record about its speed and the cost of its checkpoints.

The attempt reports the figures in events. The report page, the screen and the advice read them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from robust_train.model.attempt import Attempt, Note
from robust_train.model.events import CheckpointSaved, Event, SpeedMeasured
from robust_train.model.spec import Speed


@dataclass(frozen=True)
class SavingNote(Note):
    """The time that checkpoints cost an attempt."""

    behind = "saves"
    folds = (CheckpointSaved,)

    saving_seconds: float = 0.0  # the seconds for which training waited for checkpoints

    def after(self, event: Event, attempt: Attempt) -> SavingNote:
        """Return the note with the seconds up to the last checkpoint that a job may resume from."""
        if not isinstance(event, CheckpointSaved) or event.loss == "diverged":
            return self
        return SavingNote(event.saving_seconds)


@dataclass(frozen=True)
class SpeedNote(Note):
    """The last measured speed of each rank."""

    behind = "memory"
    folds = (SpeedMeasured,)

    speed: tuple[Speed, ...] = ()

    def after(self, event: Event, attempt: Attempt) -> SpeedNote:
        """Return the note with new figures of a rank."""
        if not isinstance(event, SpeedMeasured):
            return self
        speed = replace(event.speed, rank=event.rank)
        # Without a batch, the number of samples in a step is unknown.
        if not attempt.spec.has_batch:
            speed = replace(speed, samples_per_second=None)
        others = [other for other in self.speed if other.rank != event.rank]
        by_rank = sorted([*others, speed], key=lambda other: other.rank)
        return SpeedNote(tuple(by_rank))
