"""Requests to a running attempt: a checkpoint, half the batch, figures of its memory."""

from robust_train.model.feature import Feature

FEATURE = Feature("requests", attempt=f"{__name__}.attempt:Requests")
