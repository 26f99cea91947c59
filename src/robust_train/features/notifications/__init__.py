"""Notifications of a job: by a user's program, or by Apprise."""

from robust_train.model.feature import Feature

FEATURE = Feature("notifications", launcher=f"{__name__}.launcher:Notifications")
