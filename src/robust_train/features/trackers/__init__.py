"""Lets all attempts of a job log to the same run of an experiment tracker."""

from robust_train.model.feature import Feature

FEATURE = Feature(
    "trackers",
    launcher=f"{__name__}.launcher:Trackers",
    attempt=f"{__name__}.attempt:TrackersOfAttempt",
)
