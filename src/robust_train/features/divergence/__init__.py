"""Divergence: detects a loss that is no longer usable, and retrains from before that point."""

from robust_train.features.divergence.model import DivergenceKeys
from robust_train.model.feature import Feature

FEATURE = Feature(
    "divergence",
    launcher=f"{__name__}.launcher:Divergence",
    attempt=f"{__name__}.attempt:WatchesLosses",
    parts=(
        f"{__name__}.record:DivergenceNote",
        f"{__name__}.record:DivergenceKnob",
        f"{__name__}.record:DivergedFinding",
        f"{__name__}.record:RepeatFinding",
    ),
    keys=(DivergenceKeys,),
)
