"""The key ``memory.samples``, which the attempt reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from robust_train.config.values import key
from robust_train.model.feature import FeatureKeys


@dataclass(frozen=True)
class SamplesKeys(FeatureKeys):
    """``memory.samples``."""

    group: ClassVar[str] = "memory"
    samples: bool = key(True, "record memory over time in `memory.jsonl`, ten times a second")
