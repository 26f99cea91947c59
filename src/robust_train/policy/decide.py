"""What to do after an attempt failed: a pure function from settings, history and GPUs.

:func:`decide` takes the first rule of the failure's row in :data:`REMEDIES` that has something to
offer. To add a remedy, add a rule to :mod:`robust_train.policy.remedies` and name it in the table.
"""

from __future__ import annotations

from dataclasses import replace

from robust_train.policy import last_remedies, remedies
from robust_train.policy.context import FailureContext
from robust_train.policy.remedies import Rule
from robust_train.policy.rules import by_users_rule
from robust_train.policy.sizes import PolicySettings, largest_up_to
from robust_train.values import (
    Attempt,
    AttemptSpec,
    Clue,
    Decision,
    FailureKind,
    GiveUp,
    GpuInfo,
    Group,
    Retry,
)

REMEDIES: dict[FailureKind, tuple[Rule, ...]] = {
    FailureKind.DEVICE_OOM: (
        remedies.room_taken_by_others,
        remedies.expandable_segments,
        remedies.halve_batch,
        last_remedies.checkpoint_gradients,
        remedies.switch_gpu,
        remedies.second_opinion,
        remedies.fewer_gpus,
        last_remedies.again_after_progress,
        last_remedies.cpu_fallback,
    ),
    FailureKind.HOST_OOM: (
        remedies.fewer_workers,
        remedies.halve_batch,
        last_remedies.checkpoint_gradients,
        last_remedies.again_after_progress,
    ),
    FailureKind.WORKER_DEATH: (remedies.fewer_workers, last_remedies.again_after_progress),
    FailureKind.DEVICE_FAULT: (
        remedies.without_expandable_segments,
        remedies.same_gpu_again,
        remedies.other_gpu,
        remedies.wait_for_other_gpu,
        remedies.fewer_gpus,
        last_remedies.cpu_fallback,
    ),
    FailureKind.DEVICE_UNAVAILABLE: (
        remedies.busy_gpu_again,
        remedies.other_gpu,
        remedies.wait_for_turn,
        remedies.fewer_gpus,
        last_remedies.cpu_fallback,
    ),
    FailureKind.COMM: (remedies.same_again,),
    FailureKind.INTERRUPTED: (remedies.killed_again,),
}
"""What to try for each kind of failure, in order. A kind that is absent is never retried."""


def first_attempt(settings: PolicySettings, gpus: Group) -> AttemptSpec:
    """Return the requested batch on the GPUs that were found on each node, or on the CPU."""
    settings = settings.for_ranks(len(gpus) * settings.nodes or settings.cpu_ranks)
    return AttemptSpec(
        gpus=gpus,
        ranks=settings.ranks,
        batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        gradient_checkpointing=settings.gradient_checkpointing,
        num_workers=settings.num_workers,
        prefetch_factor=settings.prefetch_factor,
        expandable_segments=settings.expandable_segments,
        has_batch=settings.has_batch,
    )


def on_gpus(settings: PolicySettings, spec: AttemptSpec, gpus: Group) -> AttemptSpec:
    """Return ``spec`` on these GPUs; another number of them shares its effective batch."""
    if len(gpus) == spec.ranks:
        return replace(spec, gpus=gpus)
    size, accumulation = largest_up_to(settings.for_ranks(len(gpus)), spec.batch_size)
    sized = replace(spec, batch_size=size, gradient_accumulation_steps=accumulation)
    return replace(sized, gpus=gpus, ranks=len(gpus))


def decide(
    settings: PolicySettings,  # what the user asked for
    history: tuple[Attempt, ...],  # every attempt so far; the last one has failed
    # the GPUs that could be taken now, best first; empty where there are none
    gpus: tuple[GpuInfo, ...],
    held: tuple[GpuInfo, ...] = (),  # GPUs that the job may use, but that others have now
) -> Decision:
    """Choose the next attempt, or give up.

    A retry that has to wait for room carries in ``otherwise`` what to do if the wait is in vain.
    """
    context = FailureContext(settings, history, gpus, held)
    ruled = by_users_rule(context)
    if ruled is not None:
        return ruled
    if context.failure.kind is FailureKind.DEVICE_FAULT:
        not_the_device = remedies.same_fault_elsewhere(context)
        if not_the_device is not None:
            return GiveUp(not_the_device)
    return _first_remedy(context, REMEDIES.get(context.failure.kind, ()))


def decide_on_request(settings: PolicySettings, history: tuple[Attempt, ...]) -> Decision:
    """Return what comes after an attempt that stopped because its user wants the batch halved."""
    return remedies.halve_batch_on_request(FailureContext(settings, history, ()))


def concluded(attempt: Attempt, decision: Decision | None) -> Attempt:
    """Return the attempt, its unclear lack of memory now a bug if no remedy has helped."""
    failure = attempt.outcome.failure
    if failure is None or not isinstance(decision, GiveUp):
        return attempt
    if failure.kind is not FailureKind.HOST_OOM or failure.evidence.clue != Clue.UNCLEAR:
        return attempt
    bug = replace(failure, kind=FailureKind.BUG, advice=())
    return replace(attempt, outcome=replace(attempt.outcome, failure=bug))


def _first_remedy(context: FailureContext, rules: tuple[Rule, ...]) -> Decision:
    for number, rule in enumerate(rules, start=1):
        retry = rule(context)
        if retry is None or (context.keeps_batch and not _has_same_split(retry, context)):
            continue
        if retry.room is not None:
            return replace(retry, otherwise=_first_remedy(context, rules[number:]))
        return retry
    return GiveUp(_why_give_up(context))


def _has_same_split(retry: Retry, context: FailureContext) -> bool:
    specs = retry.spec, context.last
    splits = {(s.batch_size, s.gradient_accumulation_steps, s.ranks) for s in specs}
    return len(splits) == 1 and retry.action != "fewer_gpus"  # have the others' samples as well


def _why_give_up(context: FailureContext) -> str:
    """Return one sentence: what failed, and with what it was tried."""
    kind, message, settings = context.failure.kind, context.failure.message, context.settings
    if kind not in REMEDIES or context.evidence.clue == Clue.UNCLEAR:
        rank = context.failure.rank
        return message if rank is None else f"{message} (rank {rank})"
    if kind.is_memory and context.failed_before_training:
        if context.evidence.clue == Clue.IMPORT:
            return f"out of memory while a module was imported: no smaller batch helps: {message}"
        return (
            "out of memory before the first step: model, optimizer and data do not fit, and a "
            f"smaller batch does not help: {message}"
        )
    if kind is FailureKind.INTERRUPTED:
        count = context.failures_without_progress
        return f"{message}, {count} times without progress" if count > 1 else message
    if kind is FailureKind.COMM:
        count = context.failures_without_progress
        what = "hang" if context.evidence.library == "robust_train" else "network failure"
        attempts = "attempts" if count > 1 else "attempt"
        return f"{what}, {count} {attempts} without progress: giving up ({message})"
    tried: dict[str, list[str]] = {}
    for attempt in context.history:
        size, reached = str(attempt.spec.batch_size), attempt.outcome.micro_batch
        reached_size = size if reached is None else f"{size} down to {reached}"
        tried.setdefault(attempt.spec.device, []).append(reached_size)
    listed = "; ".join(f"{device} at micro-batch {', '.join(b)}" for device, b in tried.items())
    if kind.is_memory:
        hint = "" if settings.allow_cpu_fallback else " (allow_cpu_fallback is false)"
        if not any(attempt.outcome.has_begun for attempt in context.history):
            hint += "; no attempt reported a step: where model or data do not fit, no batch does"
        if context.keeps_batch:
            hint += f"; the batch was not split: {context.keeps_batch}"
        return f"out of memory on every device that may be used: {listed}{hint}"
    return f"{kind.value} again after every remedy ({listed}): {message}"
