"""What to do after an attempt failed: a pure function from settings, history and GPUs.

:func:`decide` looks the failure's kind up in :data:`REMEDIES` and takes the first rule that has
something to offer. The rules live in
:mod:`robust_train.policy.remedies`; adding a remedy is adding a rule to the table.
"""

from __future__ import annotations

from dataclasses import replace

from robust_train.errors import AttemptsExhausted
from robust_train.policy.context import Case
from robust_train.policy.remedies import (
    Rule,
    back_in_line,
    cpu_fallback,
    expandable_segments,
    fewer_workers,
    halve_batch,
    halve_batch_on_request,
    other_gpu,
    room_taken_by_others,
    same_again,
    same_failure_elsewhere,
    switch_gpu,
)
from robust_train.policy.sizes import PolicySettings, ladder, next_rung
from robust_train.values import (
    MEMORY_FAILURES,
    Attempt,
    AttemptSpec,
    Decision,
    FailureKind,
    GiveUp,
    GpuInfo,
    Group,
)

__all__ = [
    "REMEDIES",
    "AttemptsExhausted",
    "PolicySettings",
    "decide",
    "decide_as_asked",
    "first_attempt",
    "ladder",
    "next_rung",
]


REMEDIES: dict[FailureKind, tuple[Rule, ...]] = {
    FailureKind.DEVICE_OOM: (
        room_taken_by_others,
        expandable_segments,
        halve_batch,
        switch_gpu,
        cpu_fallback,
    ),
    FailureKind.HOST_OOM: (fewer_workers, halve_batch),
    FailureKind.WORKER_DEATH: (fewer_workers,),
    FailureKind.DEVICE_FAULT: (other_gpu, cpu_fallback),
    FailureKind.DEVICE_UNAVAILABLE: (other_gpu, back_in_line, cpu_fallback),
    FailureKind.COMM: (same_again,),
}
"""What to try for each kind of failure, in order. A kind that is absent is never retried."""

_BLAMED_ON_THE_DEVICE = frozenset({FailureKind.DEVICE_FAULT, FailureKind.COMM})


def first_attempt(settings: PolicySettings, gpus: Group) -> AttemptSpec:
    """The requested batch on the GPUs that were found, or the CPU."""
    settings = settings.for_ranks(len(gpus) or settings.cpu_ranks)
    return AttemptSpec(
        gpus=gpus,
        ranks=settings.ranks,
        batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        num_workers=settings.num_workers,
        prefetch_factor=settings.prefetch_factor,
        expandable_segments=settings.expandable_segments,
    )


def decide(
    settings: PolicySettings, history: tuple[Attempt, ...], gpus: tuple[GpuInfo, ...]
) -> Decision:
    """Choose the next attempt, or give up.

    A retry that has to wait for room carries in ``otherwise`` what to do if the waiting is in vain.

    Args:
        settings: what the user asked for.
        history: every attempt so far; the last one has failed.
        gpus: the GPUs that could be taken now, best first; empty where there are none.
    """
    case = Case(settings, history, gpus)
    if case.failure.kind in _BLAMED_ON_THE_DEVICE:
        not_the_device = same_failure_elsewhere(case)
        if not_the_device is not None:
            return GiveUp(not_the_device)
    return _first_remedy(case, REMEDIES.get(case.failure.kind, ()))


def decide_as_asked(settings: PolicySettings, history: tuple[Attempt, ...]) -> Decision:
    """What to do after an attempt was stopped because its user wants the batch halved."""
    return halve_batch_on_request(Case(settings, history, ()))


def _first_remedy(case: Case, rules: tuple[Rule, ...]) -> Decision:
    for number, rule in enumerate(rules, start=1):
        retry = rule(case)
        if retry is None:
            continue
        if retry.room is not None:
            return replace(retry, otherwise=_first_remedy(case, rules[number:]))
        return retry
    return GiveUp(_why_give_up(case))


def _why_give_up(case: Case) -> str:
    """One sentence: what failed, and with what it was tried."""
    kind, message = case.failure.kind, case.failure.message
    if kind not in REMEDIES:
        return f"{kind.value} is not retried: {message}"
    tried: dict[str, list[str]] = {}
    for attempt in case.history:
        size, reached = str(attempt.spec.batch_size), attempt.outcome.micro_batch
        sizes = size if reached is None else f"{size} down to {reached}"
        tried.setdefault(attempt.spec.device, []).append(sizes)
    listed = "; ".join(f"{device} at micro-batch {', '.join(b)}" for device, b in tried.items())
    if kind in MEMORY_FAILURES:
        hint = "" if case.settings.allow_cpu_fallback else " (allow_cpu_fallback is false)"
        return f"out of memory on every device that may be used: {listed}{hint}"
    return f"{kind.value} again after everything that may help ({listed}): {message}"
