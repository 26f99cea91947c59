"""Requests to a running attempt: for a checkpoint, half the batch, or memory figures."""

from robust_train.model.feature import Feature

FEATURE = Feature("requests", attempt=f"{__name__}.attempt:Requests")
