"""Logs each cause of slow training once, if it costs much time."""

from robust_train.model.feature import Feature

FEATURE = Feature(
    "slow", launcher=f"{__name__}.launcher:SlowTraining", parts=(f"{__name__}.record:SlowNote",)
)
