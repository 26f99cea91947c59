"""Gradient checkpointing for the smallest micro-batch: a remedy of the launcher's policy. Pure."""

from __future__ import annotations

from robust_train.features.gradient_checkpointing.record import GradientsKnob
from robust_train.model.failure import FailureKind
from robust_train.model.spec import Retry
from robust_train.policy.context import FailureContext
from robust_train.policy.sizes import sizes


def checkpoint_gradients(context: FailureContext) -> Retry | None:
    """Retry the smallest micro-batch, with activations recomputed instead of kept.

    If splitting changes the loss, the micro-batch stays as it is.
    """
    last = context.last
    config = context.config
    is_possible = config.may_checkpoint_gradients and context.settings.can_checkpoint
    is_done = last.of(GradientsKnob).gradient_checkpointing
    if not is_possible or is_done or context.failed_before_training:
        return None
    # Activations are on the GPU, if there is one.
    if context.failure.kind is FailureKind.HOST_OOM and last.gpus:
        return None
    *_, size = sizes(context.sizes)
    if context.keeps_loss:
        size = last.batch_size
    change = f"{context.at_size}: {size if last.has_batch else 'again'}"
    how = (
        f"{change} with gradient checkpointing: the same gradients in about a third more time "
        "(training.gradient_checkpointing)"
    )
    return context.retry(
        "gradient_checkpointing", how, GradientsKnob(gradient_checkpointing=True), batch_size=size
    )
