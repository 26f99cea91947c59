"""The CPU as the last device, if the user allows it and no GPU can do the job."""

from robust_train.model.feature import Feature

FEATURE = Feature("cpu_fallback")
