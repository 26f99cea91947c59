"""The data-loader workers of an attempt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from robust_train.model.spec import Knob

if TYPE_CHECKING:
    from robust_train.config.schema import RobustConfig


@dataclass(frozen=True)
class WorkersKnob(Knob):
    """How many there are, and how far they work ahead."""

    behind = "ranks"

    num_workers: int = 0  # data-loader workers of each rank
    prefetch_factor: int = 2  # batches that each worker prepares ahead

    @classmethod
    def asked(cls, config: RobustConfig, environ: Mapping[str, str]) -> WorkersKnob:
        """Return what the keys under ``training`` say."""
        return cls(config.training.num_workers, config.training.prefetch_factor)

    def applied(self, config: RobustConfig) -> RobustConfig:
        """Return the config with these keys."""
        training = replace(
            config.training, num_workers=self.num_workers, prefetch_factor=self.prefetch_factor
        )
        return replace(config, training=training)
