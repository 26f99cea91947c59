"""Retries that several features' rules offer. Pure, called by rules in the launcher."""

from __future__ import annotations

from collections.abc import Sequence

from robust_train.model.gpu import GpuInfo, Group, device_name
from robust_train.model.spec import Retry
from robust_train.policy.context import FailureContext, exchanged

LONGEST_PAUSE_SECONDS = 3600.0


def halved(context: FailureContext, why: str) -> Retry:
    """Return the retry with the next smaller micro-batch. Its reason starts with ``why``."""
    last = context.last
    spec = context.smaller
    reason = f"{why}micro-batch {last.batch_size} → {spec.batch_size}"
    was = last.gradient_accumulation_steps
    now = spec.gradient_accumulation_steps
    if now != was:
        reason += f", accumulation {was} → {now}"
    return Retry(spec, "halve_batch", reason, context.warning_about(spec))


def after_pause(context: FailureContext, seconds: float) -> Retry | None:
    """Return the same attempt again after a pause, None if this failure may not come once more."""
    if not context.has_retries:
        return None
    return context.retry(
        "retry", f": the same again in {seconds:g} s, from {context.saved}", pause_seconds=seconds
    )


def pause_before(context: FailureContext, tries: int) -> float:
    """Return the pause before another try, in seconds. It doubles each time, up to an hour."""
    first = context.config.retry_pause_seconds
    longest = max(first, LONGEST_PAUSE_SECONDS)
    return min(first * 2.0 ** min(tries - 1, 30), longest)


def untried(context: FailureContext) -> list[GpuInfo]:
    """Return available GPUs that had no attempt since progress, best first."""
    if not context.config.picks_gpu:
        return []
    left = context.tried_devices | context.faulty
    return [
        gpu
        for gpu in context.offers.gpus
        if gpu.uuid not in left
        and gpu.unusable is None
        and gpu.free_bytes >= context.config.min_gpu_memory_bytes
    ]


def exchange(
    context: FailureContext, leaving: Group, offers: Sequence[GpuInfo], how: str, why: str = ""
) -> Retry | None:
    """Return a retry of the same batch on other GPUs. ``how`` and ``why`` go before and after their
    names."""
    group = exchanged(context.last.gpus, leaving, offers)
    if not group:
        return None
    new = device_name(context.new_in(group))
    return context.retry("switch_gpu", f"{how}{new}{why}", gpus=group)
