"""What an attempt may do when a step runs out of memory, and what the record says of that."""

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
    """Why a step could not be computed in parts; in no file.

    That splitting would change the loss is the kernel's to know: other features heed it as well.
    """

    folds = (SplitChecked,)

    # the attempt has ended since a step cannot be computed in parts: why
    cannot_split: str = ""

    def after(self, event: Event, attempt: Attempt) -> SplitNote:
        """Return the note after a check of whether a step can be split."""
        match event:
            case SplitChecked(ends_attempt=True, kept="no"):
                return self
            case SplitChecked(ends_attempt=True):
                return SplitNote(event.message)
        return self
