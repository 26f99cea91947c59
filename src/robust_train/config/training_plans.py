"""The plans by which an attempt splits the batch of a step and saves checkpoints.

The process that trains reads them from the config, or, in a script, from environment variables. So
the module imports no library. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from robust_train.config.schema import RobustConfig
    from robust_train.model.spec import AttemptSpec


@dataclass(frozen=True)
class MicroBatchPlan:
    """The plan by which the batch of a step is split."""

    # Largest number of samples in one forward and backward pass. None starts with the whole batch.
    batch_size: int | None = None
    gradient_accumulation_steps: int = 1
    min_batch_size: int = 1  # a part of this size is not split further

    @property
    def samples(self) -> int | None:
        """Samples of a rank in an optimizer step, or None if unknown."""
        if not self.batch_size:
            return self.batch_size
        return self.batch_size * self.gradient_accumulation_steps

    @classmethod
    def of(cls, config: RobustConfig) -> MicroBatchPlan:
        """Return the plan of an attempt's config."""
        return cls(
            batch_size=config.training.batch_size,
            gradient_accumulation_steps=config.training.gradient_accumulation_steps,
            min_batch_size=config.min_batch_size,
        )


@dataclass(frozen=True)
class SplitRule:
    """The reaction if the losses of a batch's parts do not add up to the loss of the batch.

    Attributes:
        is_exact: whether such a step must not be computed in parts.
        ends_attempt: whether running out of memory then ends the attempt, because the launcher has
            other remedies.
    """

    is_exact: bool = False
    ends_attempt: bool = False

    @classmethod
    def of(cls, config: RobustConfig, spec: AttemptSpec) -> SplitRule:
        """Return the rule of an attempt."""
        preserves = config.preserve_effective_batch_size
        may_end = preserves is not False and not spec.noted("splits_loss", False)
        return cls(is_exact=preserves is True, ends_attempt=may_end)

    @classmethod
    def named(cls, name: str | None) -> SplitRule:
        """Return the rule with this :attr:`name`. Without a name, return the rule ``warn``."""
        rules = {rule.name: rule for rule in (cls(), cls(False, True), cls(True, True))}
        return rules.get(name or "", cls())

    @property
    def name(self) -> str:
        """The value in a script's environment: ``exact``, ``other_remedies_first`` or ``warn``."""
        if self.is_exact:
            return "exact"
        return "other_remedies_first" if self.ends_attempt else "warn"


@dataclass(frozen=True)
class SavePlan:
    """The plan by which checkpoints are saved."""

    # Longest time between two checkpoints. None means as often as saving is cheap.
    every_seconds: float | None = None
    # Largest number of optimizer steps between two checkpoints. 0 means any number.
    every_steps: int = 0

    @classmethod
    def of(cls, config: RobustConfig) -> SavePlan:
        """Return the plan of a config."""
        minutes = config.training.checkpoint_every_minutes
        return cls(
            every_seconds=None if minutes is None else 60 * minutes,
            every_steps=config.training.checkpoint_every_steps or 0,
        )
