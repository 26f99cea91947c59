"""The note about a script's newest checkpoint, which the remedies read."""

from __future__ import annotations

from dataclasses import dataclass

from robust_train.model.attempt import Attempt, Note
from robust_train.model.events import CheckpointUnused, Event


@dataclass(frozen=True)
class ScriptCheckpointsNote(Note):
    """A script's checkpoint from which no attempt can resume. The note is in no file."""

    folds = (CheckpointUnused,)

    # The path of the newest checkpoint, if that checkpoint is incomplete.
    not_whole: str | None = None

    def after(self, event: Event, attempt: Attempt) -> ScriptCheckpointsNote:
        """Return the note with a checkpoint that cannot be used."""
        if isinstance(event, CheckpointUnused):
            return ScriptCheckpointsNote(event.path)
        return self
