"""The fields of an attempt's record about divergence, and the settings that a retry may change.

:mod:`.attempt` makes the findings in the process that trains. In the launcher, the remedies in
:mod:`.model` read them and choose the knob of the next attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from robust_train.model.attempt import Attempt, Note
from robust_train.model.events import CheckpointSaved, Event, UpdateSkipped
from robust_train.model.failure import Finding
from robust_train.model.spec import Knob

if TYPE_CHECKING:
    from robust_train.config.schema import RobustConfig


@dataclass(frozen=True)
class DivergenceKnob(Knob):
    """How an attempt repeats the steps in which training diverged."""

    written_after = "accumulates"

    lr_factor: float = 1.0  # `training.lr` is multiplied by it
    # The data up to this optimizer step is skipped, if the trainer can do that.
    skips_to: int = 0

    def apply_to_config(self, config: RobustConfig) -> RobustConfig:
        """Return the config with the lower learning rate."""
        training = replace(config.training, lr=config.training.lr * self.lr_factor)
        return replace(config, training=training)


@dataclass(frozen=True)
class DivergedFinding(Finding):
    """The steps in which training diverged."""

    written_after = "library"

    good_step: int | None = None  # the last step before training diverged
    bad_step: int | None = None  # the last step whose loss was checked


@dataclass(frozen=True)
class RepeatFinding(Finding):
    """How the trainer can change the steps that it repeats."""

    written_after = "has_checkpoint"

    passes_over: bool = False  # whether it can skip data (`DivergenceKnob.skips_to`)
    reads_lr: bool = False  # whether it uses the learning rate of its config


@dataclass(frozen=True)
class DivergenceNote(Note):
    """Whether an attempt is guarded, and how many updates the guard skipped."""

    written_after = "saved_step"
    folds = (CheckpointSaved, UpdateSkipped)

    # Whether the last checkpoint that is known to be good is kept.
    is_guarded: bool = False
    # Updates skipped because the loss or the gradient norm was not finite.
    skipped_updates: int = 0

    def after(self, event: Event, attempt: Attempt) -> DivergenceNote:
        """Return the note after a checkpoint, or a skipped update."""
        match event:
            case CheckpointSaved(is_useful=False):
                return self
            case CheckpointSaved():
                return replace(self, is_guarded=event.is_guarded)
            case UpdateSkipped():
                return replace(self, skipped_updates=self.skipped_updates + 1)
        return self
