"""The key ``detach``. The command reads it before it starts the job."""

from __future__ import annotations

from dataclasses import dataclass

from robust_train.config.values import key
from robust_train.model.feature import FeatureKeys


@dataclass(frozen=True)
class DetachKeys(FeatureKeys):
    """``detach``."""

    detach: bool = key(
        False, "continue in the background, past logout", more="([walk away](walk-away.md))"
    )
