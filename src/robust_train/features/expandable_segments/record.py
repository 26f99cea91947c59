"""The knob for expandable segments. The launcher chooses it and exports it to the attempt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from robust_train.host.allocator import VARIABLE, allocator_settings, use_expandable_segments
from robust_train.model.spec import Knob

if TYPE_CHECKING:
    from robust_train.config.schema import RobustConfig


@dataclass(frozen=True)
class SegmentsKnob(Knob):
    """Whether the attempt's CUDA allocator uses expandable segments."""

    behind = "ranks"

    expandable_segments: bool = True

    @classmethod
    def asked(cls, config: RobustConfig, environ: Mapping[str, str]) -> SegmentsKnob:
        """Return the user's setting, or the setting that suits the job if the user made none."""
        setting = use_expandable_segments(
            config.chosen("expandable_segments"),
            environ,
            is_safe=config.traits.takes_expandable_segments,
            gpus=config.num_gpus,
        )
        return cls(setting)

    def apply_to_environ(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Return the environment with the setting added to the user's own allocator settings."""
        setting = allocator_settings(environ, expandable_segments=self.expandable_segments)
        return {**environ, VARIABLE: setting}
