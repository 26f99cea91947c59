"""The fields of an attempt's record about its speed and the cost of its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace

from robust_train.model.attempt import Attempt, Note
from robust_train.model.events import CheckpointSaved, Event, SpeedMeasured
from robust_train.model.spec import Speed


@dataclass(frozen=True)
class SavingNote(Note):
    """The time that checkpoints have cost an attempt."""

    behind = "saves"
    folds = (CheckpointSaved,)

    saving_seconds: float = 0.0  # seconds for which they held training up

    def after(self, event: Event, attempt: Attempt) -> SavingNote:
        """Return the note with the seconds up to the last checkpoint that may be resumed from."""
        if not isinstance(event, CheckpointSaved) or event.loss == "diverged":
            return self
        return SavingNote(event.saving_seconds)


@dataclass(frozen=True)
class SpeedNote(Note):
    """The speed of each rank that measured it."""

    behind = "memory"
    folds = (SpeedMeasured,)

    speed: tuple[Speed, ...] = ()

    def after(self, event: Event, attempt: Attempt) -> SpeedNote:
        """Return the note with the last figures of a rank in place of those before."""
        if not isinstance(event, SpeedMeasured):
            return self
        speed = replace(event.speed, rank=event.rank)
        # The number of samples in a step is unknown.
        if not attempt.spec.has_batch:
            speed = replace(speed, samples_per_second=None)
        others = [other for other in self.speed if other.rank != event.rank]
        by_rank = sorted([*others, speed], key=lambda other: other.rank)
        return SpeedNote(tuple(by_rank))
