"""What may help after a failure: one pure rule for each remedy, from a case to a retry or None."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from robust_train.ladder import PolicySettings, at_micro_batch, ladder, next_rung
from robust_train.types import (
    MIB,
    Attempt,
    AttemptSpec,
    Evidence,
    Failure,
    FailureKind,
    GpuInfo,
    Retry,
    Room,
)

_NOTABLE_BYTES = 256 * MIB


@dataclass(frozen=True)
class Case:
    """All that a rule may look at: settings, every attempt so far, and the GPUs now, best first."""

    settings: PolicySettings
    history: tuple[Attempt, ...]
    gpus: tuple[GpuInfo, ...]

    @property
    def last(self) -> AttemptSpec:
        """What the attempt that just failed was using when it failed.

        A trainer that splits its batches further by itself tells; then the next attempt need not
        find that size out again.
        """
        attempt = self.history[-1]
        reached = attempt.outcome.micro_batch
        if reached is None or reached >= attempt.spec.batch_size:
            return attempt.spec
        batch_size, accumulation = at_micro_batch(self.settings, reached)
        return replace(
            attempt.spec, batch_size=batch_size, gradient_accumulation_steps=accumulation
        )

    @property
    def failure(self) -> Failure:
        """Why it failed."""
        failure = self.history[-1].outcome.failure
        assert failure is not None, "a completed attempt needs no decision"
        return failure

    @property
    def evidence(self) -> Evidence:
        """The figures of the failure."""
        return self.failure.evidence

    @property
    def tried_devices(self) -> frozenset[str]:
        """UUIDs of the GPUs that have had an attempt, and ``cpu`` if it has."""
        return frozenset(attempt.spec.device_key for attempt in self.history)

    @property
    def smaller_batches_tried_here(self) -> int:
        """How often a failure reduced the micro-batch on the device that failed last."""
        sizes = {
            a.spec.batch_size
            for a in self.history
            if a.spec.device_key == self.last.device_key and a.outcome.stopped_for is None
        }
        return len(sizes) - 1

    @property
    def taken_by_others_bytes(self) -> int:
        """By how much the GPU's free memory fell without us, 0 where that is not known."""
        outcome = self.history[-1].outcome
        if outcome.gpu_free_before_bytes is None or outcome.gpu_free_after_bytes is None:
            return 0
        return max(outcome.gpu_free_before_bytes - outcome.gpu_free_after_bytes, 0)

    def failures_of(self, kind: FailureKind) -> int:
        """How many attempts failed in this way."""
        outcomes = (attempt.outcome for attempt in self.history)
        return sum(o.failure is not None and o.failure.kind is kind for o in outcomes)


Rule = Callable[[Case], "Retry | None"]


def room_taken_by_others(case: Case) -> Retry | None:
    """Somebody else took the memory: the same batch where there is room, or when there is again."""
    gpu, settings, evidence = case.last.gpu, case.settings, case.evidence
    taken = case.taken_by_others_bytes
    if gpu is None or taken < _NOTABLE_BYTES or not _would_have_fitted(evidence, taken):
        return None
    if _same_tried_here(case) > settings.max_retries:
        return None
    needed = case.history[-1].outcome.gpu_free_before_bytes
    assert needed is not None
    said = f"{_what_failed(case)}, but others took {taken // MIB} MiB of it meanwhile"
    if settings.may_switch_gpu:
        for other in _untried(case):
            if other.free_bytes >= needed:
                return Retry(
                    replace(case.last, gpu=other),
                    action="switch_gpu",
                    reason=f"{said}; {_named(other)} has {other.free_bytes // MIB} MiB free: "
                    "same batch there",
                )
    if not settings.may_wait:
        return None
    return Retry(
        case.last,
        action="wait",
        reason=f"{said}: same batch when {needed // MIB} MiB are free there again",
        room=Room(gpu.uuid, needed),
    )


def expandable_segments(case: Case) -> Retry | None:
    """The allocator held enough memory in pieces too small: the same batch without pieces."""
    last, settings = case.last, case.settings
    if last.gpu is None or last.expandable_segments or not settings.may_use_expandable_segments:
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
    batch_size, accumulation = next_rung(settings, last.batch_size)
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
        batch_size, accumulation = next_rung(settings, last.batch_size)
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
    """The best GPU not tried yet, if it offers more memory than the one that failed did."""
    failed_gpu = case.last.gpu
    if failed_gpu is None or not case.settings.may_switch_gpu:
        return None
    for gpu in _untried(case):
        if gpu.free_bytes <= failed_gpu.free_bytes:
            continue
        batch_size, accumulation = _rung_that_should_fit(case, gpu)
        spec = replace(
            case.last,
            gpu=gpu,
            batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
        )
        return Retry(
            spec,
            action="switch_gpu",
            reason=f"{_what_failed(case)} at micro-batch {case.last.batch_size}; "
            f"{spec.device} has {gpu.free_bytes // MIB} MiB free "
            f"({failed_gpu.free_bytes // MIB} were free on {case.last.device})",
            warning=_effective_batch_warning(case.settings, spec),
        )
    return None


def other_gpu(case: Case) -> Retry | None:
    """The same batch on the best GPU not tried yet: this one is sick, or not to be had."""
    if case.last.gpu is None or not case.settings.may_switch_gpu:
        return None
    for gpu in _untried(case):
        return Retry(
            replace(case.last, gpu=gpu),
            action="switch_gpu",
            reason=f"{_what_failed(case)}: same batch on {_named(gpu)}; "
            f"{_named(case.last.gpu)} is avoided from now on",
        )
    return None


def back_in_line(case: Case) -> Retry | None:
    """Somebody else was faster on the GPU: the same batch on the next one that is to be had.

    Only where the GPUs themselves show it, since a device may be unavailable for good as well.
    """
    gpu, settings = case.last.gpu, case.settings
    if gpu is None or not settings.may_wait or any(now.uuid == gpu.uuid for now in case.gpus):
        return None
    if case.failures_of(FailureKind.DEVICE_UNAVAILABLE) > settings.max_retries:
        return None
    return Retry(
        case.last,
        action="wait",
        reason=f"{_what_failed(case)}, and somebody else has it: same batch when its turn comes",
        room=Room(None if settings.may_switch_gpu else gpu.uuid, settings.min_gpu_memory_bytes),
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
    spec = replace(
        case.last,
        gpu=None,
        batch_size=case.settings.batch_size,
        gradient_accumulation_steps=case.settings.gradient_accumulation_steps,
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
    for earlier in case.history[:-1]:
        if earlier.outcome.failure is None or earlier.spec.device_key == attempt.spec.device_key:
            continue
        if earlier.outcome.failure.kind is not failure.kind:
            continue
        if earlier.outcome.end_step == attempt.outcome.end_step:
            step = attempt.outcome.end_step
            where = "before the first step" if step is None else f"at step {step}"
            return (
                f"the same failure {where} on two devices ({earlier.spec.device} and "
                f"{attempt.spec.device}) is not the device's: {failure.message}"
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


def _rung_that_should_fit(case: Case, gpu: GpuInfo) -> tuple[int, int]:
    """The largest rung within the share by which ``gpu`` offers more than the failed one did.

    Memory is near-affine in the micro-batch with a constant part above zero, so ``k`` times the
    memory holds at least ``k`` times the micro-batch that almost fitted.
    """
    failed_gpu = case.last.gpu
    assert failed_gpu is not None
    growth = gpu.free_bytes / max(failed_gpu.free_bytes, 1)
    rungs = list(ladder(case.settings))
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


def _named(gpu: GpuInfo) -> str:
    return f"cuda:{gpu.index}"


def _what_failed(case: Case) -> str:
    kind, device = case.failure.kind, case.last.device
    if kind is FailureKind.DEVICE_OOM:
        return f"out of memory on {device}"
    if kind is FailureKind.HOST_OOM:
        return "out of memory on the host"
    if kind is FailureKind.DEVICE_FAULT:
        return f"{device} failed ({case.failure.message})"
    if kind is FailureKind.DEVICE_UNAVAILABLE:
        return f"{device} is not to be had ({case.failure.message})"
    return case.failure.message
