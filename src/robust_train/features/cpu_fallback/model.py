"""The remedy that continues on the CPU. In the launcher, ``policy.decide`` calls it after all other
remedies for a kind of failure. Pure."""

from __future__ import annotations

from robust_train.model.failure import FailureKind
from robust_train.model.spec import Retry
from robust_train.policy.context import FailureContext


def fall_back_to_cpu(context: FailureContext) -> Retry | None:
    """Retry on the CPU at the requested batch, once, if the user allows it."""
    if not context.config.allow_cpu_fallback or "cpu" in context.tried_devices:
        return None
    request = context.settings.for_ranks(context.settings.cpu_ranks).asked
    how = " and no other GPU is available: the job continues on the CPU"
    if context.failure.kind is FailureKind.DEVICE_OOM:
        how = f"{context.at_size} and no GPU has more free memory: the job continues on the CPU"
    return context.retry(
        "cpu_fallback",
        how,
        gpus=(),
        ranks=request.ranks,
        batch_size=request.batch_size,
        parts=context.last.with_same("gradient_checkpointing", request).parts,
    )
