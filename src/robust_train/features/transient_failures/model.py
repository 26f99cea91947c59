"""Remedies that retry the same attempt, because networks recover and some crashes do not repeat.

`assembly.load_remedies` orders them, and ``policy.decide`` calls them in the launcher. Pure.
"""

from __future__ import annotations

from robust_train.model.failure import Clue
from robust_train.model.gpu import device_name
from robust_train.model.spec import Retry
from robust_train.policy.context import FailureContext
from robust_train.policy.retries import LONGEST_PAUSE_SECONDS, pause_before, retry_after_pause

_RATE_LIMIT_FACTOR = 30.0
"""The pause after a rate limit, as a multiple of the usual pause. By default, the first pause is 5
minutes, a usual period in which servers count requests."""


def retry_unchanged(context: FailureContext) -> Retry | None:
    """Retry after a pause that doubles each time, because peers, networks and disks may recover."""
    pause = pause_before(context, context.failures_without_progress)
    if context.evidence.clue == Clue.RATE_LIMIT:
        longer = min(pause * _RATE_LIMIT_FACTOR, LONGEST_PAUSE_SECONDS)
        pause = max(pause, longer)
    return retry_after_pause(context, pause)


def retry_after_kill(context: FailureContext) -> Retry | None:
    """Retry from the last checkpoint after a person or a program, not the kernel, killed the
    attempt or a data-loader worker."""
    if context.evidence.clue != Clue.KILLED or not context.has_retries:
        return None
    where = device_name(context.last.gpus)
    return context.retry("retry", f": the same again on {where} from {context.saved}")


def retry_after_crash(context: FailureContext) -> Retry | None:
    """Retry once after a segmentation fault, which may be a cosmic ray. A second fault is a bug."""
    crashes = [attempt.evidence.clue == Clue.CRASHED for attempt in context.since_progress]
    if context.evidence.clue != Clue.CRASHED or sum(crashes) > 1:
        return None
    return context.retry("retry", f": once more, from {context.saved}")


def retry_unknown_failure(context: FailureContext) -> Retry | None:
    """Retry once from a checkpoint after a failure of unknown origin. If the failure happens again
    before the next checkpoint, the program is to blame."""
    if context.evidence.clue != Clue.UNKNOWN or context.config.retries < 1:
        return None
    if not context.has_saved or context.unknown_before:
        return None
    why = "neither a known failure nor certainly a bug"
    return context.retry("retry", f": {why}, so once more, from {context.saved}")
