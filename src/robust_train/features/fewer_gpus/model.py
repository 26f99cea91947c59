"""Fewer GPUs that share the same effective batch."""

from __future__ import annotations

from robust_train.model.spec import Retry, Room
from robust_train.policy.context import FailureContext, uuids


def fewer_gpus(context: FailureContext) -> Retry | None:
    """Go on with fewer GPUs at the same effective batch, where the user allows it."""
    excluded = {*context.faulty}
    if context.failure.rank is not None:
        excluded.update(uuids(context.failed_gpus))
    counts = context.settings.fewer_ranks(len(context.last.gpus))
    if not counts:
        return None
    least = context.config.min_gpu_memory_bytes
    room = Room((), least, tuple(sorted(excluded)), counts)
    how = (
        " and no other GPU is available: on with fewer GPUs "
        f"(min_num_gpus={context.config.min_num_gpus})"
    )
    return context.retry("fewer_gpus", how, room=room)
