"""What the record of an attempt says of the guard against divergence."""

from __future__ import annotations

from dataclasses import dataclass, replace

from robust_train.model.attempt import Attempt, Note
from robust_train.model.events import CheckpointSaved, Event, UpdateSkipped


@dataclass(frozen=True)
class DivergenceNote(Note):
    """What guards an attempt, and what that has cost."""

    behind = "saved_step"

    # the last checkpoint that is known to be good stays
    is_guarded: bool = False
    skipped_updates: int = 0  # loss or gradient norm was not finite

    def after(self, event: Event, attempt: Attempt) -> DivergenceNote:
        """Return the note after a checkpoint, or an update that was left out."""
        match event:
            case CheckpointSaved(loss="diverged"):
                return self
            case CheckpointSaved():
                return replace(self, is_guarded=event.is_guarded)
            case UpdateSkipped():
                return replace(self, skipped_updates=self.skipped_updates + 1)
        return self
