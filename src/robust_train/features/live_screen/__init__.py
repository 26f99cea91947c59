"""The live lines of a job on a terminal that it has to itself."""

from robust_train.model.feature import Feature

FEATURE = Feature("live_screen", launcher=f"{__name__}.launcher:LiveScreen")
