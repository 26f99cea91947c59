"""Slow training: a cause that costs a lot of time is logged once."""

from robust_train.model.feature import Feature

FEATURE = Feature(
    "slow", launcher=f"{__name__}.launcher:SlowTraining", parts=(f"{__name__}.record:SlowNote",)
)
