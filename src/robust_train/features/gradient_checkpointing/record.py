"""Whether an attempt keeps its activations or computes them again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from robust_train.model.spec import Knob

if TYPE_CHECKING:
    from robust_train.config.schema import RobustConfig


@dataclass(frozen=True)
class GradientsKnob(Knob):
    """Activations are recomputed in the backward pass."""

    behind = "accumulates"

    gradient_checkpointing: bool = False

    @classmethod
    def asked(cls, config: RobustConfig, environ: Mapping[str, str]) -> GradientsKnob:
        """Return the value of ``training.gradient_checkpointing``. By default, it is a remedy."""
        return cls(config.training.gradient_checkpointing is True)

    def apply_to_config(self, config: RobustConfig) -> RobustConfig:
        """Return the config with this key."""
        training = replace(config.training, gradient_checkpointing=self.gradient_checkpointing)
        return replace(config, training=training)
