"""The note of an attempt about the checkpoints that its script writes."""

from __future__ import annotations

from dataclasses import dataclass

from robust_train.model.attempt import Attempt, Note
from robust_train.model.events import CheckpointUnused, Event


@dataclass(frozen=True)
class ScriptCheckpointsNote(Note):
    """The file of a script that cannot be resumed from. No file of ours has it."""

    folds = (CheckpointUnused,)

    # Path of its newest checkpoint, if that is incomplete.
    not_whole: str | None = None

    def after(self, event: Event, attempt: Attempt) -> ScriptCheckpointsNote:
        """Return the note with a file that cannot be used."""
        return ScriptCheckpointsNote(event.path) if isinstance(event, CheckpointUnused) else self
