"""Training that continues on fewer GPUs, where the user allows it."""

from robust_train.model.feature import Feature

FEATURE = Feature("fewer_gpus")
