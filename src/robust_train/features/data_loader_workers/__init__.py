"""Data-loader workers, fewer of them when they hold the memory."""

from robust_train.model.feature import Feature

FEATURE = Feature("data_loader_workers", parts=(f"{__name__}.record:WorkersKnob",))
