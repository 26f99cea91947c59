"""The remedies that start fewer data-loader workers when these hold the memory or die."""

from __future__ import annotations

import re

from robust_train.features.data_loader_workers.record import WorkersFinding, WorkersKnob
from robust_train.model.failure import Clue, FailureKind
from robust_train.model.spec import Retry
from robust_train.policy.context import FailureContext

# Options of torch's DataLoader that it refuses without workers.
_NEEDS_WORKERS = re.compile(r"persistent_workers|prefetch_factor|num_workers|multiprocessing")


def fewer_workers(context: FailureContext) -> Retry | None:
    """Halve the data-loader workers if they hold the memory or die, each with less ahead.

    If they hold the memory, one worker is left, since many programs cannot load in the training
    process. The built-in trainer can. If workers die, training without any is tried once.
    """
    evidence = context.evidence
    seen = evidence.of(WorkersFinding)
    last = context.last.of(WorkersKnob)
    is_host = context.failure.kind is FailureKind.HOST_OOM
    # If a worker died, there were workers.
    has_none = seen.no_workers or (is_host and seen.workers == 0)
    holds_little = is_host and seen.workers_hold_most is False
    if has_none or holds_little or _workers_are_fixed(context):
        return None
    if evidence.clue in (Clue.IMPORT, Clue.MODEL):
        return None
    workers = last.num_workers // 2
    prefetch = last.prefetch_factor
    if context.config.theirs is None:  # a project has no key for it
        prefetch = max(prefetch // 2, 1)
    tried = {attempt.spec.of(WorkersKnob).num_workers for attempt in context.history}
    has_tried_none = 0 in tried
    may_have_none = context.config.is_built_in or not (is_host or has_tried_none)
    workers = workers if may_have_none else max(workers, 1)
    if workers >= last.num_workers:
        return None
    how = f": {last.num_workers} → {workers} data-loader workers"
    if workers and prefetch != last.prefetch_factor:
        how += f", {last.prefetch_factor} → {prefetch} batches ahead"
    return context.retry("fewer_workers", how, WorkersKnob(workers, prefetch))


def workers_after_all(context: FailureContext) -> Retry | None:
    """Return to a single worker if the trainer refused to train without workers."""
    before = context.history[-2:-1]
    had_some = any(
        attempt.spec.of(WorkersKnob).num_workers and attempt.kind is FailureKind.WORKER_DEATH
        for attempt in before
    )
    is_refused = _NEEDS_WORKERS.search(context.failure.message)
    knob = context.last.of(WorkersKnob)
    if knob.num_workers or not had_some or not is_refused:
        return None
    how = ": it cannot do without data-loader workers: 0 → 1"
    return context.retry("fewer_workers", how, WorkersKnob(1, knob.prefetch_factor))


def _workers_are_fixed(context: FailureContext) -> bool:
    """Return whether the trainer had as many workers although its config has fewer."""
    seen = context.evidence.of(WorkersFinding).workers
    given = context.last.of(WorkersKnob).num_workers
    return bool(seen) and any(
        attempt.spec.of(WorkersKnob).num_workers > given
        and attempt.evidence.of(WorkersFinding).workers == seen
        for attempt in context.history[:-1]
    )
