"""Experiment trackers continue one run through all attempts of a job."""

from robust_train.model.feature import Feature

FEATURE = Feature(
    "trackers",
    launcher=f"{__name__}.launcher:Trackers",
    attempt=f"{__name__}.attempt:TrackersOfAttempt",
)
