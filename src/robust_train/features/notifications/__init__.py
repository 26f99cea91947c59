"""Sends notifications about a job, through a user's program or through Apprise."""

from robust_train.model.feature import Feature

FEATURE = Feature("notifications", launcher=f"{__name__}.launcher:Notifications")
