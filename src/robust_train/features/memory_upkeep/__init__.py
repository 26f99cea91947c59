"""The memory of a running attempt: its limit, its cache, and a record of the largest tensors when
memory runs out."""

from robust_train.features.memory_upkeep.model import CacheKeys, ClearKeys, SnapshotKeys
from robust_train.model.feature import Feature

FEATURE = Feature(
    "memory_upkeep",
    attempt=f"{__name__}.attempt:memory_upkeep",
    parts=(f"{__name__}.record:UpkeepNote",),
    keys=(CacheKeys, ClearKeys, SnapshotKeys),
)
