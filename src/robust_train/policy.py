"""What to do after an attempt failed: a pure function from settings, history and GPUs.

:func:`decide` looks the failure's kind up in :data:`REMEDIES` and takes the first rule that has
something to offer. Each rule is a pure function of one :class:`Case`; adding a remedy is adding a
rule to the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from robust_train.types import (
    MEMORY_FAILURES,
    MIB,
    Attempt,
    AttemptSpec,
    Decision,
    Failure,
    FailureKind,
    GiveUp,
    GpuInfo,
    Retry,
)


class AttemptsExhausted(RuntimeError):
    """Memory ran out with everything that may be tried; the message lists what was."""


@dataclass(frozen=True)
class PolicySettings:
    """What the user asked for, as far as decisions depend on it.

    Attributes:
        batch_size: requested micro-batch.
        gradient_accumulation_steps: requested accumulation.
        num_workers: requested data-loader workers.
        min_batch_size: no attempt uses a smaller micro-batch.
        max_retries: smaller micro-batches tried on one device before it is given up.
        may_switch_gpu: whether another GPU may be taken.
        allow_cpu_fallback: whether the CPU may be taken in the end.
        preserve_effective_batch_size: whether accumulation grows as the micro-batch shrinks.
        min_gpu_memory_bytes: memory a GPU must have free to be taken.
    """

    batch_size: int
    gradient_accumulation_steps: int = 1
    num_workers: int = 0
    min_batch_size: int = 4
    max_retries: int = 3
    may_switch_gpu: bool = True
    allow_cpu_fallback: bool = True
    preserve_effective_batch_size: bool = True
    min_gpu_memory_bytes: int = 0

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step that the user asked for."""
        return self.batch_size * self.gradient_accumulation_steps


@dataclass(frozen=True)
class Case:
    """All that a rule may look at: settings, every attempt so far, and the GPUs now, best first."""

    settings: PolicySettings
    history: tuple[Attempt, ...]
    gpus: tuple[GpuInfo, ...]

    @property
    def last(self) -> AttemptSpec:
        """What the attempt that just failed had used."""
        return self.history[-1].spec

    @property
    def failure(self) -> Failure:
        """Why it failed."""
        failure = self.history[-1].outcome.failure
        assert failure is not None, "a completed attempt needs no decision"
        return failure

    @property
    def tried_devices(self) -> frozenset[str]:
        """UUIDs of the GPUs that have had an attempt, and ``cpu`` if it has."""
        return frozenset(attempt.spec.device_key for attempt in self.history)

    @property
    def smaller_batches_tried_here(self) -> int:
        """How often the micro-batch was reduced on the device that failed last."""
        sizes = {
            a.spec.batch_size for a in self.history if a.spec.device_key == self.last.device_key
        }
        return len(sizes) - 1


Rule = Callable[[Case], "Retry | None"]


def first_attempt(settings: PolicySettings, gpu: GpuInfo | None) -> AttemptSpec:
    """The requested batch on the device that was found."""
    return AttemptSpec(
        gpu=gpu,
        batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        num_workers=settings.num_workers,
    )


def decide(
    settings: PolicySettings, history: tuple[Attempt, ...], gpus: tuple[GpuInfo, ...]
) -> Decision:
    """Choose the next attempt, or give up.

    Args:
        settings: what the user asked for.
        history: every attempt so far; the last one has failed.
        gpus: the GPUs that could be taken now, best first; empty where there are none.
    """
    case = Case(settings, history, gpus)
    for rule in REMEDIES.get(case.failure.kind, ()):
        retry = rule(case)
        if retry is not None:
            return retry
    return GiveUp(_why_give_up(case))


def fewer_workers(case: Case) -> Retry | None:
    """Data-loader workers hold host memory of their own: half of them, down to none."""
    if case.last.num_workers == 0:
        return None
    workers = case.last.num_workers // 2
    return Retry(
        replace(case.last, num_workers=workers),
        action="fewer_workers",
        reason=f"{_what_failed(case)}: {case.last.num_workers} → {workers} data-loader workers",
    )


def halve_batch(case: Case) -> Retry | None:
    """Half the micro-batch on the same device, while there is something to halve."""
    settings, last = case.settings, case.last
    if last.batch_size <= settings.min_batch_size:
        return None
    if case.smaller_batches_tried_here >= settings.max_retries:
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


def switch_gpu(case: Case) -> Retry | None:
    """The best GPU not tried yet, if it offers more memory than the one that failed did."""
    settings, failed_gpu = case.settings, case.last.gpu
    if failed_gpu is None or not settings.may_switch_gpu:
        return None
    for gpu in case.gpus:
        enough = gpu.free_bytes >= settings.min_gpu_memory_bytes
        has_more = gpu.free_bytes > failed_gpu.free_bytes
        if gpu.uuid in case.tried_devices or gpu.unusable or not (enough and has_more):
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
            warning=_effective_batch_warning(settings, spec),
        )
    return None


def cpu_fallback(case: Case) -> Retry | None:
    """The CPU at the requested batch, once, where the user allows it."""
    if not case.settings.allow_cpu_fallback or "cpu" in case.tried_devices:
        return None
    return Retry(
        first_attempt(case.settings, gpu=None),
        action="cpu_fallback",
        reason=f"{_what_failed(case)} at micro-batch {case.last.batch_size} "
        "and no GPU has more to offer",
    )


REMEDIES: dict[FailureKind, tuple[Rule, ...]] = {
    FailureKind.DEVICE_OOM: (halve_batch, switch_gpu, cpu_fallback),
    FailureKind.HOST_OOM: (fewer_workers, halve_batch),
}
"""What to try for each kind of failure, in order. A kind that is absent is never retried."""


def next_rung(settings: PolicySettings, batch_size: int) -> tuple[int, int]:
    """The next smaller micro-batch and its accumulation.

    At most half of ``batch_size`` but not below ``min_batch_size``; among those the largest divisor
    of the effective batch, so that the product stays exact. Where no divisor lies in that range the
    accumulation is rounded up, and the effective batch is no longer exact.
    """
    at_most = max(batch_size // 2, settings.min_batch_size)
    if not settings.preserve_effective_batch_size:
        return at_most, settings.gradient_accumulation_steps
    effective = settings.effective_batch_size
    for candidate in range(at_most, settings.min_batch_size - 1, -1):
        if effective % candidate == 0:
            return candidate, effective // candidate
    return at_most, -(-effective // at_most)


def ladder(settings: PolicySettings) -> Iterator[tuple[int, int]]:
    """Every (micro-batch, accumulation) from the requested one down to ``min_batch_size``."""
    rung = settings.batch_size, settings.gradient_accumulation_steps
    yield rung
    while rung[0] > settings.min_batch_size:
        rung = next_rung(settings, rung[0])
        yield rung


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


def _what_failed(case: Case) -> str:
    place = {FailureKind.DEVICE_OOM: case.last.device, FailureKind.HOST_OOM: "the host"}
    return f"out of memory on {place.get(case.failure.kind, case.last.device)}"


def _why_give_up(case: Case) -> str:
    if case.failure.kind not in MEMORY_FAILURES:
        return f"{case.failure.kind.value} is not a matter of memory and is not retried"
    tried: dict[str, list[str]] = {}
    for attempt in case.history:
        tried.setdefault(attempt.spec.device, []).append(str(attempt.spec.batch_size))
    listed = "; ".join(f"{device} at micro-batch {', '.join(b)}" for device, b in tried.items())
    hint = "" if case.settings.allow_cpu_fallback else " (allow_cpu_fallback is false)"
    return f"out of memory on every device that may be used: {listed}{hint}"
