"""The knob for gradient checkpointing. The launcher chooses it, and the attempt's config has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from robust_train.model.spec import Knob

if TYPE_CHECKING:
    from robust_train.config.schema import RobustConfig


@dataclass(frozen=True)
class GradientsKnob(Knob):
    """Whether an attempt recomputes activations in the backward pass instead of keeping them."""

    behind = "accumulates"

    gradient_checkpointing: bool = False

    @classmethod
    def asked(cls, config: RobustConfig, environ: Mapping[str, str]) -> GradientsKnob:
        """Return whether ``training.gradient_checkpointing`` is true. By default the key is unset,
        and only the remedy turns it on."""
        return cls(config.training.gradient_checkpointing is True)

    def apply_to_config(self, config: RobustConfig) -> RobustConfig:
        """Return the config with this key."""
        training = replace(config.training, gradient_checkpointing=self.gradient_checkpointing)
        return replace(config, training=training)
