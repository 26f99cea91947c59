"""The result of checking whether splitting a batch keeps its loss.

:mod:`.split_checker` creates it. :mod:`.split_watch` and the user read it, in the process that
trains or in any process that calls ``check_split``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kept(Enum):
    """Whether splitting keeps a loss, as far as known."""

    YES = "yes"  # the weighted losses of the parts add up to the loss of the whole
    NO = "no"  # they do not
    CANNOT = "cannot"  # the loss of a part cannot be computed
    UNKNOWN = "unknown"  # the losses could not be compared


@dataclass(frozen=True)
class SplitCheck:
    """The result of comparing a part's loss with the losses of its halves.

    Attributes:
        kept: whether splitting keeps the loss.
        seen: the losses in a sentence, or the reason why they could not be compared.
        samples: the number of samples in the compared part.
    """

    kept: Kept
    seen: str = ""
    samples: int = 0

    @property
    def is_kept(self) -> bool:
        """Whether the weighted losses of the parts add up to the loss of the whole."""
        return self.kept is Kept.YES

    @property
    def message(self) -> str:
        """The result and the fix, in one line."""
        match self.kept:
            case Kept.YES:
                return f"splitting keeps this loss: {self.seen}"
            case Kept.NO:
                return f"splitting changes this loss: {self.seen}. {ADVICE}"
            case Kept.CANNOT:
                return f"this step cannot be split: {self.seen}"
        return f"whether splitting changes this loss could not be checked: {self.seen}"


NOTHING_TO_COMPARE = "its part has no loss"
"""The reason if the loss is zero or a mean over no items. The next batch may have a loss."""

ADVICE = (
    "If it is a mean over tokens, masks or weights, give count=…; if the first dimension is not "
    "samples, give split=… and length=…; a loss that compares samples of a batch cannot be split"
)
