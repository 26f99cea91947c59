"""What an attempt may do when a step runs out of memory, in its spec and its record."""

from __future__ import annotations

from dataclasses import dataclass

from robust_train.model.attempt import Attempt, Note
from robust_train.model.events import Event, SplitChecked
from robust_train.model.spec import Knob


@dataclass(frozen=True)
class SplitLossKnob(Knob):
    """Steps are split although the losses of parts do not add up to the loss of the batch."""

    behind = "searches"

    splits_loss: bool = False


@dataclass(frozen=True)
class SplitNote(Note):
    """Why a step could not be computed in parts. In no file.

    Whether splitting would change the loss is a field of the kernel, because other features use it
    too.
    """

    folds = (SplitChecked,)

    # Why a step cannot be computed in parts, if that ended the attempt.
    cannot_split: str = ""

    def after(self, event: Event, attempt: Attempt) -> SplitNote:
        """Return the note after a check of whether a step can be split."""
        match event:
            case SplitChecked(ends_attempt=True, kept="no"):
                return self
            case SplitChecked(ends_attempt=True):
                return SplitNote(event.message)
        return self
