"""The keys for the memory of a running attempt. Steps are optimizer steps.

:mod:`.attempt` reads them, in the process that trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from robust_train.config.values import CLEARED_AFTER, FROM_0, SHARE, cleared_after, key
from robust_train.model.feature import FeatureKeys


@dataclass(frozen=True)
class CacheKeys(FeatureKeys):
    """The keys for the times at which the CUDA cache is emptied, except ``memory.clear_after``."""

    group: ClassVar[str] = "memory"
    empty_cache_frequency: int = key(
        10, "steps between checks of the CUDA cache; `0`: never", range=FROM_0
    )
    empty_cache_threshold: float = key(
        0.5, "share of the cache that must be unused before it is emptied", range=SHARE
    )
    clear_on_start: bool = key(True, "empty the CUDA cache at the start")


@dataclass(frozen=True)
class ClearKeys(FeatureKeys):
    """``memory.clear_after``."""

    group: ClassVar[str] = "memory"
    clear_after: tuple[str, ...] = key(
        CLEARED_AFTER,
        "empty the cache after a `save` or an `epoch`; clear a failed trainer's frames after a "
        "`failure`",
        more="Without `failure`, a debugger can inspect the frames",
        accepts="list",
        read=cleared_after,
    )


@dataclass(frozen=True)
class SnapshotKeys(FeatureKeys):
    """``memory.snapshot_on_oom``."""

    group: ClassVar[str] = "memory"
    snapshot_on_oom: bool = key(True, "record what fills the memory when memory runs out")
