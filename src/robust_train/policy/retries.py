"""Builds retries for the remedies of several features. Pure, and called in the launcher."""

from __future__ import annotations

from collections.abc import Sequence

from robust_train.model.gpu import GpuInfo, Group, device_name
from robust_train.model.spec import Retry
from robust_train.policy.context import FailureContext
from robust_train.policy.gpus import replace_gpus
from robust_train.policy.result_warnings import warn_of_changes

LONGEST_PAUSE_SECONDS = 3600.0


def retry_with_half(context: FailureContext, why: str) -> Retry:
    """Return a retry with the next smaller micro-batch. Its reason starts with ``why``."""
    last = context.last
    spec = context.smaller
    reason = f"{why}micro-batch {last.batch_size} → {spec.batch_size}"
    was = last.gradient_accumulation_steps
    now = spec.gradient_accumulation_steps
    if now != was:
        reason += f", accumulation {was} → {now}"
    return Retry(spec, "halve_batch", reason, warn_of_changes(context, spec))


def retry_after_pause(context: FailureContext, seconds: float) -> Retry | None:
    """Return a retry of the same attempt after a pause, or None if ``max_retries`` is used up."""
    if not context.has_retries:
        return None
    how = f": the same again in {seconds:g} s, from {context.saved}"
    return context.retry("retry", how, pause_seconds=seconds)


def pause_before(context: FailureContext, tries: int) -> float:
    """Return the pause before the next try, in seconds. It doubles with each try, up to an hour."""
    first = context.config.retry_pause_seconds
    longest = max(first, LONGEST_PAUSE_SECONDS)
    return min(first * 2.0 ** min(tries - 1, 30), longest)


def untried_gpus(context: FailureContext) -> list[GpuInfo]:
    """Return the available GPUs that had no attempt since the last progress, best first. Empty if
    the user chose the GPU."""
    if not context.config.picks_gpu:
        return []
    ruled_out = context.tried_devices | context.faulty
    return [
        gpu
        for gpu in context.offers.gpus
        if gpu.uuid not in ruled_out
        and gpu.unusable is None
        and gpu.free_bytes >= context.config.min_gpu_memory_bytes
    ]


def retry_on_other_gpus(
    context: FailureContext, leaving: Group, offers: Sequence[GpuInfo], how: str, why: str = ""
) -> Retry | None:
    """Return the retry of the same batch on other GPUs, None if there are too few.

    Args:
        context: the failure.
        leaving: the GPUs to replace.
        offers: the GPUs that may replace them, best first.
        how: the text of the reason before the names of the new GPUs.
        why: the text of the reason after their names.
    """
    group = replace_gpus(context.last.gpus, leaving, offers)
    if not group:
        return None
    new = device_name(context.new_in(group))
    return context.retry("switch_gpu", f"{how}{new}{why}", gpus=group)
