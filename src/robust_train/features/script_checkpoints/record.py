"""The checkpoints that a script writes, in the record of an attempt."""

from __future__ import annotations

from dataclasses import dataclass

from robust_train.model.attempt import Attempt, Note
from robust_train.model.events import CheckpointUnused, Event


@dataclass(frozen=True)
class ScriptCheckpointsNote(Note):
    """The script's file that cannot be resumed from. In no file."""

    folds = (CheckpointUnused,)

    # Path of its newest checkpoint, if that is incomplete.
    not_whole: str | None = None

    def after(self, event: Event, attempt: Attempt) -> ScriptCheckpointsNote:
        """Return the note with a file that cannot be used."""
        return ScriptCheckpointsNote(event.path) if isinstance(event, CheckpointUnused) else self
