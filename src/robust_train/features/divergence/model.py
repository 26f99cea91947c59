"""What helps when training diverged: an earlier checkpoint, then a lower learning rate."""

from __future__ import annotations

from robust_train.features.divergence.record import DivergenceKnob
from robust_train.model.spec import Retry
from robust_train.policy.context import FailureContext

_LESS_LEARNING = 0.5


def before_it_diverged(context: FailureContext) -> Retry | None:
    """Retry from the last checkpoint before it, once: data or chance may have been the cause."""
    if not context.evidence.has_checkpoint or context.failures_without_progress > 1:
        return None
    return _back(context, "before_it_diverged", context.last.of(DivergenceKnob).lr_factor, "")


def lower_learning_rate(context: FailureContext) -> Retry | None:
    """Retry from the last checkpoint before it with a lower learning rate."""
    tries = context.failures_without_progress - context.evidence.has_checkpoint
    if not context.evidence.reads_lr:
        return None
    if tries > context.config.retries:
        return None
    lower = context.last.of(DivergenceKnob).lr_factor * _LESS_LEARNING
    return _back(context, "lower_learning_rate", lower, f" with {lower:g} times the learning rate")


def _back(context: FailureContext, action: str, lr_factor: float, with_less: str) -> Retry:
    bad = context.evidence.bad_step or 0
    skips = bad if context.evidence.passes_over else 0
    data = f"; the data up to step {skips} is skipped" if skips else ""
    where = "from it" if context.evidence.has_checkpoint else "from the beginning"
    how = f": again {where}{with_less}{data}"
    return context.retry(action, how, DivergenceKnob(lr_factor, skips))
