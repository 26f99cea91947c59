"""The knob that splits steps although that changes the loss, and the note of why a step was not
split."""

from __future__ import annotations

from dataclasses import dataclass

from robust_train.model.attempt import Attempt, Note
from robust_train.model.events import Event, SplitChecked
from robust_train.model.spec import Knob


@dataclass(frozen=True)
class SplitLossKnob(Knob):
    """Whether steps are split although the losses of parts do not add up to the batch's loss."""

    behind = "accumulates"

    splits_loss: bool = False


@dataclass(frozen=True)
class SplitNote(Note):
    """The reason why a step could not be computed in parts. The note is in no file.

    Whether splitting would change the loss is a field of `Attempt`, because other features need it
    too.
    """

    folds = (SplitChecked,)

    # The reason, if the attempt ended because a step cannot be computed in parts.
    cannot_split: str = ""

    def after(self, event: Event, attempt: Attempt) -> SplitNote:
        """Return the note after a check of whether a step can be split."""
        match event:
            case SplitChecked(ends_attempt=True, kept="no"):
                return self
            case SplitChecked(ends_attempt=True):
                return SplitNote(event.message)
        return self
