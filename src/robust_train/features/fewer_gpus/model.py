"""The key ``min_num_gpus``, and the remedy that continues on fewer GPUs.

``policy.decide`` calls the remedy in the launcher. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from robust_train.config.values import FROM_1, key
from robust_train.model.feature import FeatureKeys
from robust_train.model.spec import Retry, Room
from robust_train.policy.context import FailureContext
from robust_train.policy.gpus import uuids


@dataclass(frozen=True)
class FewerGpusKeys(FeatureKeys):
    """``min_num_gpus``."""

    min_num_gpus: int | None = key(
        None,
        "continue on fewer GPUs, at least this many, if no more become free in time; `null`: never",
        more="At the start, or after a GPU failed. The effective batch stays the same",
        range=FROM_1,
    )

    def mistakes(self, config: Any) -> Iterator[str]:
        """Yield a message if the minimum is above ``num_gpus``."""
        gpus = config.num_gpus
        if (self.min_num_gpus or 1) > gpus:
            yield f"min_num_gpus={self.min_num_gpus}: must not be above num_gpus={gpus}"


def continue_on_fewer_gpus(context: FailureContext) -> Retry | None:
    """Continue on fewer GPUs at the same effective batch, if the user allows it."""
    excluded = set(context.faulty)
    if context.failure.rank is not None:
        excluded.update(uuids(context.failed_gpus))
    counts = context.settings.fewer_ranks(len(context.last.gpus))
    if not counts:
        return None
    least = context.config.min_gpu_memory_bytes
    room = Room((), least, tuple(sorted(excluded)), counts)
    how = (
        " and no other GPU is available: the job continues on fewer GPUs "
        f"(min_num_gpus={context.config.of(FewerGpusKeys).min_num_gpus})"
    )
    return context.retry("fewer_gpus", how, room=room)
