"""What may help after a failure: one pure rule for each remedy, from a case to a retry or None."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from robust_train.policy.context import Case, exchanged, failed_gpus, uuids
from robust_train.policy.sizes import PolicySettings, ladder, next_rung
from robust_train.values import (
    MIB,
    AttemptSpec,
    Evidence,
    FailureKind,
    GpuInfo,
    Retry,
    Room,
    device_name,
)

NOTABLE_BYTES = 256 * MIB
"""Taken by others, so much is taken for the reason why memory ran out."""

Rule = Callable[[Case], "Retry | None"]


def room_taken_by_others(case: Case) -> Retry | None:
    """Somebody else took the memory: the same batch where there is room, or when there is again."""
    settings, evidence = case.settings, case.evidence
    taken = case.history[-1].outcome.taken_by_others_bytes
    if not case.last.gpus or taken < NOTABLE_BYTES or not _would_have_fitted(evidence, taken):
        return None
    if _same_tried_here(case) > settings.max_retries:
        return None
    needed = case.history[-1].outcome.gpu_free_before_bytes
    assert needed is not None
    said = f"{_what_failed(case)}, but others took {taken // MIB} MiB of it meanwhile"
    if settings.may_switch_gpu:
        offers = [gpu for gpu in _untried(case) if gpu.free_bytes >= needed]
        group = exchanged(case.last.gpus, case.failed_gpus, offers)
        if group is not None:
            least = min(gpu.free_bytes for gpu in case.new_in(group))
            return Retry(
                replace(case.last, gpus=group),
                action="switch_gpu",
                reason=f"{said}; {device_name(case.new_in(group))} has {least // MIB} MiB free: "
                "same batch there",
            )
    if not settings.may_wait:
        return None
    return Retry(
        case.last,
        action="wait",
        reason=f"{said}: same batch when {needed // MIB} MiB are free there again",
        room=Room(uuids(case.failed_gpus), needed),
    )


def expandable_segments(case: Case) -> Retry | None:
    """The allocator held enough memory in pieces too small: the same batch without pieces."""
    last, settings = case.last, case.settings
    if not last.gpus or last.expandable_segments or not settings.may_use_expandable_segments:
        return None
    if not case.evidence.fragmented:
        return None
    unused = case.evidence.reserved_unallocated_bytes or 0
    return Retry(
        replace(last, expandable_segments=True),
        action="expandable_segments",
        reason=f"{_what_failed(case)} with {unused // MIB} MiB reserved but unused: fragmentation; "
        "same batch with expandable segments",
    )


def fewer_workers(case: Case) -> Retry | None:
    """Data-loader workers hold memory of their own: half of them, each with less ahead."""
    last = case.last
    if last.num_workers == 0:
        return None
    workers, prefetch = last.num_workers // 2, max(last.prefetch_factor // 2, 1)
    ahead = "" if workers == 0 else f", {last.prefetch_factor} → {prefetch} batches ahead"
    return Retry(
        replace(last, num_workers=workers, prefetch_factor=prefetch),
        action="fewer_workers",
        reason=f"{_what_failed(case)}: {last.num_workers} → {workers} data-loader workers"
        + (ahead if prefetch != last.prefetch_factor else ""),
    )


def halve_batch(case: Case) -> Retry | None:
    """Half the micro-batch on the same device, while there is something to halve."""
    settings, last = case.settings, case.last
    if last.batch_size <= settings.min_batch_size:
        return None
    is_last = case.smaller_batches_tried_here >= settings.max_retries
    if is_last and not settings.finds_batch_size:
        return None
    batch_size, accumulation = next_rung(case.sizes, last.batch_size)
    spec = replace(last, batch_size=batch_size, gradient_accumulation_steps=accumulation)
    return Retry(
        spec,
        action="halve_batch",
        reason=f"{_what_failed(case)}: micro-batch {last.batch_size} → {batch_size}, "
        f"accumulation {last.gradient_accumulation_steps} → {accumulation}",
        warning=_effective_batch_warning(settings, spec),
    )


def halve_batch_on_request(case: Case) -> Retry:
    """Half the micro-batch on the same device because the user asks for it, as small as may be."""
    settings, last = case.settings, case.last
    spec, size = last, "as small as may be"
    if last.batch_size > settings.min_batch_size:
        batch_size, accumulation = next_rung(case.sizes, last.batch_size)
        spec = replace(last, batch_size=batch_size, gradient_accumulation_steps=accumulation)
        size = (
            f"{last.batch_size} → {batch_size}, accumulation "
            f"{last.gradient_accumulation_steps} → {accumulation}"
        )
    return Retry(
        spec,
        action="halve_batch_on_request",
        reason=f"asked for by 'robust-train run halve-batch': micro-batch {size}",
        warning=_effective_batch_warning(settings, spec),
    )


def switch_gpu(case: Case) -> Retry | None:
    """The best GPU not tried yet, if it offers more memory than the one that failed did.

    Of several GPUs that share a step all that offer no more than the failed one are exchanged:
    the next one of them would run out at the same size.
    """
    if not case.last.gpus or not case.settings.may_switch_gpu:
        return None
    had = min(gpu.free_bytes for gpu in case.failed_gpus)
    short = tuple(gpu for gpu in case.last.gpus if gpu.free_bytes <= had)
    offers = [gpu for gpu in _untried(case) if gpu.free_bytes > had]
    group = exchanged(case.last.gpus, short, offers)
    if group is None:
        return None
    offered = min(gpu.free_bytes for gpu in group)
    batch_size, accumulation = _rung_that_should_fit(case, had=had, offered=offered)
    spec = replace(
        case.last,
        gpus=group,
        batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
    )
    return Retry(
        spec,
        action="switch_gpu",
        reason=f"{_what_failed(case)} at micro-batch {case.last.batch_size}; "
        f"{spec.device} has {offered // MIB} MiB free "
        f"({had // MIB} were free on {device_name(case.failed_gpus)})",
        warning=_effective_batch_warning(case.settings, spec),
    )


def other_gpu(case: Case) -> Retry | None:
    """The same batch on the best GPU not tried yet: this one is sick, or not to be had."""
    if not case.last.gpus or not case.settings.may_switch_gpu:
        return None
    group = exchanged(case.last.gpus, case.failed_gpus, _untried(case))
    if group is None:
        return None
    return Retry(
        replace(case.last, gpus=group),
        action="switch_gpu",
        reason=f"{_what_failed(case)}: same batch on {device_name(case.new_in(group))}; "
        f"{device_name(case.failed_gpus)} is avoided from now on",
    )


def back_in_line(case: Case) -> Retry | None:
    """Somebody else was faster on the GPU: the same batch on the next one that is to be had.

    Only where the GPUs themselves show it, since a device may be unavailable for good as well.
    """
    settings, ours = case.settings, uuids(case.last.gpus)
    if not ours or not settings.may_wait or {gpu.uuid for gpu in case.gpus}.issuperset(ours):
        return None
    if case.failures_of(FailureKind.DEVICE_UNAVAILABLE) > settings.max_retries:
        return None
    return Retry(
        case.last,
        action="wait",
        reason=f"{_what_failed(case)}, and somebody else has it: same batch when its turn comes",
        room=Room(() if settings.may_switch_gpu else ours, settings.min_gpu_memory_bytes),
    )


def same_again(case: Case) -> Retry | None:
    """The same once more after a pause that doubles each time: peers and networks come back."""
    failures = case.failures_of(case.failure.kind)
    if failures > case.settings.max_retries:
        return None
    pause = case.settings.retry_pause_seconds * 2 ** (failures - 1)
    return Retry(
        case.last,
        action="retry",
        reason=f"{_what_failed(case)}: the same again in {pause:g} s",
        pause_seconds=pause,
    )


def cpu_fallback(case: Case) -> Retry | None:
    """The CPU at the requested batch, once, where the user allows it."""
    if not case.settings.allow_cpu_fallback or "cpu" in case.tried_devices:
        return None
    sizes = case.settings.for_ranks(case.settings.cpu_ranks)
    spec = replace(
        case.last,
        gpus=(),
        ranks=sizes.ranks,
        batch_size=sizes.batch_size,
        gradient_accumulation_steps=sizes.gradient_accumulation_steps,
    )
    if case.failure.kind is FailureKind.DEVICE_OOM:
        why = f"{_what_failed(case)} at micro-batch {case.last.batch_size} and no GPU has more"
        return Retry(spec, action="cpu_fallback", reason=f"{why} to offer")
    return Retry(
        spec,
        action="cpu_fallback",
        reason=f"{_what_failed(case)} and no other GPU is to be had: on the CPU",
    )


def same_failure_elsewhere(case: Case) -> str | None:
    """Why the device is not to blame: the same failure at the same step on two devices."""
    attempt, failure = case.history[-1], case.failure
    here = uuids(case.failed_gpus)
    for earlier in case.history[:-1]:
        if earlier.outcome.failure is None or uuids(failed_gpus(earlier)) == here:
            continue
        if earlier.outcome.failure.kind is not failure.kind:
            continue
        if earlier.outcome.end_step == attempt.outcome.end_step:
            step = attempt.outcome.end_step
            where = "before the first step" if step is None else f"at step {step}"
            return (
                f"the same failure {where} on two devices ({device_name(failed_gpus(earlier))} "
                f"and {device_name(case.failed_gpus)}) is not the device's: {failure.message}"
            )
    return None


def _untried(case: Case) -> list[GpuInfo]:
    """GPUs that could be taken now and have had no attempt, best first."""
    return [
        gpu
        for gpu in case.gpus
        if gpu.uuid not in case.tried_devices
        and gpu.unusable is None
        and gpu.free_bytes >= case.settings.min_gpu_memory_bytes
    ]


def _would_have_fitted(evidence: Evidence, taken: int) -> bool:
    """Whether what was asked for could have been had out of what others took."""
    if evidence.requested_bytes is None:
        return True
    return (evidence.free_bytes or 0) + taken >= evidence.requested_bytes


def _same_tried_here(case: Case) -> int:
    here = (case.last.device_key, case.last.batch_size)
    return sum((a.spec.device_key, a.spec.batch_size) == here for a in case.history)


def _rung_that_should_fit(case: Case, *, had: int, offered: int) -> tuple[int, int]:
    """The largest rung within the share by which ``offered`` bytes are more than the failed GPU's.

    Memory is near-affine in the micro-batch with a constant part above zero, so ``k`` times the
    memory holds at least ``k`` times the micro-batch that almost fitted.
    """
    growth = offered / max(had, 1)
    rungs = list(ladder(case.sizes))
    fitting = [rung for rung in rungs if rung[0] <= case.last.batch_size * growth]
    return fitting[0] if fitting else rungs[-1]


def _effective_batch_warning(settings: PolicySettings, spec: AttemptSpec) -> str | None:
    wanted = settings.effective_batch_size
    if spec.effective_batch_size == wanted:
        return None
    if not settings.preserve_effective_batch_size:
        return (
            f"the effective batch size is now {spec.effective_batch_size} instead of {wanted}: "
            "preserve_effective_batch_size is false"
        )
    return (
        f"no micro-batch from {settings.min_batch_size} to {spec.batch_size} divides the effective "
        f"batch size {wanted}; it is now {spec.effective_batch_size}"
    )


def _what_failed(case: Case) -> str:
    kind, device = case.failure.kind, device_name(case.failed_gpus)
    rank = "" if case.failure.rank is None else f" (rank {case.failure.rank})"
    if kind is FailureKind.DEVICE_OOM:
        return f"out of memory on {device}{rank}"
    if kind is FailureKind.HOST_OOM:
        return f"out of memory on the host{rank}"
    if kind is FailureKind.DEVICE_FAULT:
        return f"{device} failed ({case.failure.message})"
    if kind is FailureKind.DEVICE_UNAVAILABLE:
        return f"{device} is not to be had ({case.failure.message})"
    return case.failure.message
