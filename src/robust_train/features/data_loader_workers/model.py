"""Remedies that change the number of data-loader workers.

`assembly.load_remedies` orders them, and ``policy.decide`` calls them in the launcher. Pure.
"""

from __future__ import annotations

import re

from robust_train.features.data_loader_workers.record import WorkersFinding, WorkersKnob
from robust_train.model.failure import Clue, FailureKind
from robust_train.model.spec import Retry
from robust_train.policy.context import FailureContext

# Options of torch's DataLoader that it refuses without workers.
_NEEDS_WORKERS = re.compile(r"persistent_workers|prefetch_factor|num_workers|multiprocessing")


def reduce_workers(context: FailureContext) -> Retry | None:
    """Halve the number of data-loader workers if they fill the host's memory or die.

    Each worker then prefetches fewer batches too. If they fill the memory, at least one worker
    stays, because many programs cannot load data in the training process. The built-in trainer can.
    If workers die, the job tries once without workers.
    """
    evidence = context.evidence
    seen = evidence.of(WorkersFinding)
    last = context.last.of(WorkersKnob)
    is_host = context.failure.kind is FailureKind.HOST_OOM
    # A worker that died proves that there were workers.
    has_none = seen.no_workers or (is_host and seen.workers == 0)
    holds_little = is_host and seen.workers_hold_most is False
    if has_none or holds_little or _workers_are_fixed(context):
        return None
    if evidence.clue in (Clue.IMPORT, Clue.MODEL):
        return None
    prefetch = last.prefetch_factor
    if context.config.theirs is None:  # A project's config has no key for it.
        prefetch = max(prefetch // 2, 1)
    tried = {attempt.spec.of(WorkersKnob).num_workers for attempt in context.history}
    has_tried_none = 0 in tried
    may_have_none = context.config.is_built_in or not (is_host or has_tried_none)
    least = 0 if may_have_none else 1
    workers = max(last.num_workers // 2, least)
    if workers >= last.num_workers:
        return None
    how = f": {last.num_workers} → {workers} data-loader workers"
    if workers and prefetch != last.prefetch_factor:
        how += f", {last.prefetch_factor} → {prefetch} batches ahead"
    return context.retry("fewer_workers", how, WorkersKnob(workers, prefetch))


def restore_one_worker(context: FailureContext) -> Retry | None:
    """Return to a single worker if the trainer refused to train without workers."""
    if len(context.history) < 2:
        return None
    before = context.history[-2]
    had_workers = before.spec.of(WorkersKnob).num_workers > 0
    has_lost_worker = had_workers and before.kind is FailureKind.WORKER_DEATH
    is_refused = _NEEDS_WORKERS.search(context.failure.message) is not None
    knob = context.last.of(WorkersKnob)
    if knob.num_workers or not has_lost_worker or not is_refused:
        return None
    how = ": it cannot train without data-loader workers: 0 → 1"
    return context.retry("fewer_workers", how, WorkersKnob(1, knob.prefetch_factor))


def _workers_are_fixed(context: FailureContext) -> bool:
    """Return whether the trainer started as many workers as before, although its config asked for
    fewer."""
    seen = context.evidence.of(WorkersFinding).workers
    if not seen:
        return False
    requested = context.last.of(WorkersKnob).num_workers
    for earlier in context.history[:-1]:
        had_more_requested = earlier.spec.of(WorkersKnob).num_workers > requested
        if had_more_requested and earlier.evidence.of(WorkersFinding).workers == seen:
            return True
    return False
