"""The live lines on a terminal that a job has to itself."""

from robust_train.model.feature import Feature

FEATURE = Feature("live_screen", launcher=f"{__name__}.launcher:LiveScreen")
