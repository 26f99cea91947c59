"""The knob that lets an attempt split steps although the loss changes, and the note of why a step
could not be split.

A remedy in `.model` sets the knob, and the policy reads both, in the launcher's process.
"""

from __future__ import annotations

from dataclasses import dataclass

from robust_train.model.attempt import Attempt, Note
from robust_train.model.events import Event, SplitChecked
from robust_train.model.spec import Knob


@dataclass(frozen=True)
class SplitLossKnob(Knob):
    """Whether steps are split although the losses of parts do not add up to the batch's loss."""

    written_after = "accumulates"

    splits_loss: bool = False


@dataclass(frozen=True)
class SplitNote(Note):
    """The reason why a step could not be computed in parts. No file contains the note.

    Whether splitting would change the loss is a field of `Attempt`, because other features need it
    too.
    """

    folds = (SplitChecked,)

    # The reason, if it ended the attempt. Empty otherwise.
    cannot_split: str = ""

    def after(self, event: Event, attempt: Attempt) -> SplitNote:
        """Return the note with the reason, if the event has one."""
        if not isinstance(event, SplitChecked) or not event.ends_attempt:
            return self
        changes_loss = event.kept == "no"
        return self if changes_loss else SplitNote(event.message)
