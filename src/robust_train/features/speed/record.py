"""What the record of an attempt says of its speed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from robust_train.model.attempt import Attempt, Note
from robust_train.model.events import Event, SpeedMeasured
from robust_train.model.spec import Speed


@dataclass(frozen=True)
class SpeedNote(Note):
    """How fast each rank trained; those that measured nothing are left out."""

    behind = "memory"

    speed: tuple[Speed, ...] = ()

    def after(self, event: Event, attempt: Attempt) -> SpeedNote:
        """Return the note with the last figures of a rank in place of those before."""
        if not isinstance(event, SpeedMeasured):
            return self
        speed = replace(event.speed, rank=event.rank)
        # how many samples a step has is not known
        if not attempt.spec.has_batch:
            speed = replace(speed, samples_per_second=None)
        others = [one for one in self.speed if one.rank != event.rank]
        by_rank = sorted([*others, speed], key=lambda one: one.rank)
        return SpeedNote(tuple(by_rank))
