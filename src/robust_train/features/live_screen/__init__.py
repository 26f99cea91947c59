"""Shows a job's live status lines, if no other program writes to its terminal."""

from robust_train.model.feature import Feature

FEATURE = Feature("live_screen", launcher=f"{__name__}.launcher:LiveScreen")
