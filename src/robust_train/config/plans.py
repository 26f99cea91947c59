"""How an attempt splits its batch and when it saves. Imports no library: scripts use it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from robust_train.config.schema import RobustConfig


@dataclass(frozen=True)
class MicroBatchPlan:
    """How a batch is split inside a step."""

    # most samples in one forward and backward pass; None: the whole batch at first
    batch_size: int | None = None
    gradient_accumulation_steps: int = 1
    min_batch_size: int = 1  # parts of this many samples are not split further
    # steps without running out of memory after which a larger size is tried; None or 0: never
    regrow_after_steps: int | None = None

    @property
    def samples(self) -> int | None:
        """Samples of one rank in an optimizer step, None if unknown."""
        return self.batch_size and self.batch_size * self.gradient_accumulation_steps

    @classmethod
    def of(cls, config: RobustConfig) -> MicroBatchPlan:
        """Return the plan of an attempt's config."""
        return cls(
            batch_size=config.training.batch_size,
            gradient_accumulation_steps=config.training.gradient_accumulation_steps,
            min_batch_size=config.min_batch_size,
            regrow_after_steps=config.training.regrow_after_steps,
        )


@dataclass(frozen=True)
class SavePlan:
    """Longest time between two checkpoints (None: as often as saving is cheap), and most optimizer
    steps between two (None or 0: any number)."""

    every_seconds: float | None = None
    every_steps: int | None = None

    @classmethod
    def of(cls, config: RobustConfig) -> SavePlan:
        """Return the plan of a config."""
        minutes = config.training.checkpoint_every_minutes
        return cls(
            every_seconds=None if minutes is None else 60 * minutes,
            every_steps=config.training.checkpoint_every_steps or None,
        )
