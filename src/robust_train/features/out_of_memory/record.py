"""What an attempt may do when a step runs out of memory."""

from __future__ import annotations

from dataclasses import dataclass

from robust_train.model.spec import Knob


@dataclass(frozen=True)
class SplitLossKnob(Knob):
    """Steps are split although the losses of parts do not add up to the loss of the batch."""

    behind = "searches"

    splits_loss: bool = False
