"""How an attempt's batch is split inside a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
    def of(cls, cfg: Mapping[Any, Any]) -> MicroBatchPlan:
        """Read a composed config; ``train.py``'s has no ``min_batch_size``."""
        training = cfg["training"]
        return cls(
            batch_size=training["batch_size"],
            gradient_accumulation_steps=training["gradient_accumulation_steps"],
            min_batch_size=cfg.get("min_batch_size") or 1,
            regrow_after_steps=training.get("regrow_after_steps"),
        )
