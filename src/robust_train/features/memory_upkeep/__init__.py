"""The memory of an attempt while it runs: its limit, its cache, and the record of what filled
it."""

from robust_train.features.memory_upkeep.model import CacheKeys, ClearKeys, SnapshotKeys
from robust_train.model.feature import Feature

FEATURE = Feature(
    "memory_upkeep",
    attempt=f"{__name__}.attempt:memory_upkeep",
    parts=(f"{__name__}.record:UpkeepNote",),
    keys=(CacheKeys, ClearKeys, SnapshotKeys),
)
