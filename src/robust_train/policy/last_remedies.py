"""The last remedies: another way to save memory, the same again, the CPU."""

from __future__ import annotations

from dataclasses import replace

from robust_train.policy.context import FailureContext, what_failed
from robust_train.policy.remedies import effective_batch_warning, sized
from robust_train.policy.sizes import sizes
from robust_train.values import FailureKind, Retry


def checkpoint_gradients(context: FailureContext) -> Retry | None:
    """Retry the smallest micro-batch, with activations recomputed instead of kept."""
    settings, last = context.settings, context.last
    if not settings.may_checkpoint_gradients or last.gradient_checkpointing:
        return None
    # on a GPU it is there that activations lie
    is_hosts = context.failure.kind is FailureKind.HOST_OOM and bool(last.gpus)
    if context.failed_before_training or is_hosts:
        return None
    *_, (size, accumulation) = sizes(context.sizes)
    spec = replace(sized(last, size, accumulation), gradient_checkpointing=True)
    change = f" at micro-batch {last.batch_size}: {size}" if last.has_batch else ": again"
    reason = (
        f"{what_failed(context)}{change} with gradient checkpointing: the same gradients in about "
        "a third more time (allow_gradient_checkpointing)"
    )
    warning = effective_batch_warning(settings, spec)
    return Retry(spec, "gradient_checkpointing", reason, warning)


def again_after_progress(context: FailureContext) -> Retry | None:
    """Repeat in a new process as long as each attempt saves a later checkpoint: memory leaks."""
    if not context.got_further or context.failed_before_training:
        return None
    reason = f"{what_failed(context)}, but got further: the same again from the last checkpoint"
    return Retry(context.last, "retry", reason)


def cpu_fallback(context: FailureContext) -> Retry | None:
    """Take the CPU at the requested batch, once, where the user allows it."""
    if not context.settings.allow_cpu_fallback or "cpu" in context.tried_devices:
        return None
    settings = context.settings.for_ranks(context.settings.cpu_ranks)
    spec = replace(
        context.last,
        gpus=(),
        ranks=settings.ranks,
        gradient_checkpointing=settings.gradient_checkpointing,
    )
    spec = sized(spec, settings.batch_size, settings.gradient_accumulation_steps)
    why = f"{what_failed(context)} and no other GPU is available: on the CPU"
    if context.failure.kind is FailureKind.DEVICE_OOM:
        size = context.last.batch_size
        why = f"{what_failed(context)} at micro-batch {size} and no GPU has more to offer"
    return Retry(spec, "cpu_fallback", why)
