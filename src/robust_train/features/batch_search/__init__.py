"""The search for the largest micro-batch that fits, by probes before training."""

from robust_train.model.feature import Feature

FEATURE = Feature("batch_search", parts=(f"{__name__}.record:BatchSearchNote",))
