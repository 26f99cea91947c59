"""Fewer data-loader workers where they hold the memory."""

from __future__ import annotations

from robust_train.model.failure import Clue, FailureKind
from robust_train.model.spec import Retry
from robust_train.policy.context import FailureContext


def fewer_workers(context: FailureContext) -> Retry | None:
    """Halve the data-loader workers where they hold the memory, each with less ahead.

    One is left: many programs cannot load in the training process. The built-in trainer can.
    """
    last, evidence = context.last, context.evidence
    is_host = context.failure.kind is FailureKind.HOST_OOM
    # where a worker died there were some
    has_none = evidence.no_workers or (is_host and evidence.workers == 0)
    holds_little = is_host and evidence.workers_hold_most is False
    if has_none or holds_little or _workers_are_fixed(context):
        return None
    if evidence.clue in (Clue.IMPORT, Clue.MODEL):
        return None
    workers, prefetch = last.num_workers // 2, last.prefetch_factor
    if context.config.theirs is None:  # a project has no key for it
        prefetch = max(prefetch // 2, 1)
    workers = workers if context.config.is_built_in else max(workers, 1)
    if workers >= last.num_workers:
        return None
    how = f": {last.num_workers} → {workers} data-loader workers"
    if workers and prefetch != last.prefetch_factor:
        how += f", {last.prefetch_factor} → {prefetch} batches ahead"
    return context.retry("fewer_workers", how, num_workers=workers, prefetch_factor=prefetch)


def _workers_are_fixed(context: FailureContext) -> bool:
    """Return whether the trainer had as many workers although it was given fewer."""
    seen, given = context.evidence.workers, context.last.num_workers
    return bool(seen) and any(
        one.spec.num_workers > given and one.evidence.workers == seen
        for one in context.history[:-1]
    )
