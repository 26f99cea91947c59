"""The remedy that turns gradient checkpointing on for the smallest micro-batch.

``policy.decide`` calls it in the launcher. Pure.
"""

from __future__ import annotations

from robust_train.features.gradient_checkpointing.record import GradientsKnob
from robust_train.model.failure import FailureKind
from robust_train.model.spec import Retry
from robust_train.policy.context import FailureContext
from robust_train.policy.settings import list_sizes


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
    size = last.batch_size if context.keeps_loss else list_sizes(context.rank_settings)[-1]
    what = str(size) if last.has_batch else "again"
    how = (
        f"{context.at_size}: {what} with gradient checkpointing: the same gradients in about a "
        "third more time (training.gradient_checkpointing)"
    )
    return context.retry(
        "gradient_checkpointing", how, GradientsKnob(gradient_checkpointing=True), batch_size=size
    )
