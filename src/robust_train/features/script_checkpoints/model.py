"""The remedy for a script that cannot read its checkpoint. ``policy.decide`` calls it in the
launcher. Pure."""

from __future__ import annotations

from robust_train.model.failure import Clue
from robust_train.model.spec import Retry
from robust_train.policy.context import FailureContext


def resume_from_earlier_checkpoint(context: FailureContext) -> Retry | None:
    """Retry once from the checkpoint before the checkpoint that the script could not read."""
    if context.evidence.clue != Clue.DAMAGED or not context.evidence.has_checkpoint:
        return None
    if context.failures_without_progress > 1:
        return None
    file = context.attempt.checkpoint or context.attempt.resumed_from
    how = f": {file} cannot be read: again from the checkpoint before it"
    return context.retry("earlier_checkpoint", how)
