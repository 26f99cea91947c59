"""What the record of an attempt says of its speed, and of what held it up."""

from __future__ import annotations

from dataclasses import dataclass, replace

from robust_train.model.attempt import Attempt, Note
from robust_train.model.events import CheckpointSaved, Event, SpeedMeasured
from robust_train.model.spec import Speed


@dataclass(frozen=True)
class SavingNote(Note):
    """What checkpoints have cost an attempt."""

    behind = "saves"
    folds = (CheckpointSaved,)

    saving_seconds: float = 0.0  # for which they held training up

    def after(self, event: Event, attempt: Attempt) -> SavingNote:
        """Return the note with the seconds up to the last checkpoint that may be resumed from."""
        if not isinstance(event, CheckpointSaved) or event.loss == "diverged":
            return self
        return SavingNote(event.saving_seconds)


@dataclass(frozen=True)
class SpeedNote(Note):
    """How fast each rank trained; those that measured nothing are left out."""

    behind = "memory"
    folds = (SpeedMeasured,)

    speed: tuple[Speed, ...] = ()

    def after(self, event: Event, attempt: Attempt) -> SpeedNote:
        """Return the note with the last figures of a rank in place of those before."""
        if not isinstance(event, SpeedMeasured):
            return self
        speed = replace(event.speed, rank=event.rank)
        # how many samples a step has is not known
        if not attempt.spec.has_batch:
            speed = replace(speed, samples_per_second=None)
        others = [other for other in self.speed if other.rank != event.rank]
        by_rank = sorted([*others, speed], key=lambda measured: measured.rank)
        return SpeedNote(tuple(by_rank))
