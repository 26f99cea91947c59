"""Carries out requests to a running attempt, such as a checkpoint or half the batch."""

from robust_train.model.feature import Feature

FEATURE = Feature("requests", attempt=f"{__name__}.attempt:Requests")
