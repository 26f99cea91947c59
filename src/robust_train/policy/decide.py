"""What to do after an attempt failed: a pure function from settings, history and GPUs.

The user's own rules (``retry.rules``) come first. Then :func:`decide` takes the first rule of the
failure's row in :data:`REMEDIES` that has something to offer. To add a remedy, add a rule to
:mod:`robust_train.policy.remedies` and name it in the table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from robust_train.host.search import is_found
from robust_train.model.attempt import Attempt
from robust_train.model.failure import Clue, Failure, FailureKind
from robust_train.model.gpu import Group
from robust_train.model.spec import AttemptSpec, Decision, GiveUp, Retry, RetryRule
from robust_train.policy import remedies
from robust_train.policy.context import FailureContext, Offers
from robust_train.policy.remedies import Rule
from robust_train.policy.sizes import PolicySettings, size_to_begin_with

REMEDIES: dict[FailureKind, tuple[Rule, ...]] = {
    FailureKind.DEVICE_OOM: (
        remedies.room_taken_by_others,
        remedies.expandable_segments,
        remedies.halve_batch,
        remedies.checkpoint_gradients,
        remedies.switch_gpu,
        remedies.second_opinion,
        remedies.again_after_progress,
        remedies.split_all_the_same,
        remedies.sizes_left,
        remedies.cpu_fallback,
    ),
    FailureKind.HOST_OOM: (
        remedies.fewer_workers,
        remedies.halve_batch,
        remedies.checkpoint_gradients,
        remedies.again_after_progress,
        remedies.split_all_the_same,
        remedies.sizes_left,
    ),
    FailureKind.WORKER_DEATH: (
        remedies.fewer_workers,
        remedies.killed_again,
        remedies.less_for_workers,
        remedies.again_after_progress,
    ),
    FailureKind.DEVICE_FAULT: (
        remedies.without_expandable_segments,
        remedies.half_after_internal_errors,
        remedies.same_gpu_again,
        remedies.fault_without_a_gpu_once_more,
        remedies.other_gpu,
        remedies.wait_for_other_gpu,
        remedies.fewer_gpus,
        remedies.cpu_fallback,
    ),
    FailureKind.DEVICE_UNAVAILABLE: (
        remedies.busy_gpu_again,
        remedies.other_gpu,
        remedies.wait_for_turn,
        remedies.fewer_gpus,
        remedies.cpu_fallback,
    ),
    FailureKind.DISK_FULL: (remedies.same_again,),
    FailureKind.COMM: (remedies.same_again,),
    FailureKind.DIVERGED: (remedies.before_it_diverged, remedies.lower_learning_rate),
    FailureKind.INTERRUPTED: (remedies.killed_again,),
    FailureKind.BUG: (
        remedies.crashed_once_more,
        remedies.unknown_once_more,
        remedies.earlier_checkpoint,
    ),
}
"""What to try for each kind of failure, in order. A kind that is absent is never retried."""

EXCLUDE_GPU = "exclude_gpu"


def first_decision(settings: PolicySettings, gpus: Group) -> Retry:
    """Return what the job begins with on the GPUs that were found, or on the CPU."""
    spec, why = size_to_begin_with(settings, (), first_attempt(settings, gpus))
    return Retry(spec, "start", why)


def first_attempt(settings: PolicySettings, gpus: Group) -> AttemptSpec:
    """Return the requested batch on these GPUs, or on the CPU."""
    asked = settings.for_ranks(len(gpus) or settings.cpu_ranks).asked
    return replace(asked, gpus=gpus)


def decide(settings: PolicySettings, history: tuple[Attempt, ...], offers: Offers) -> Decision:
    """Choose the next attempt, or give up.

    A retry that has to wait for room carries in ``otherwise`` what to do if the wait is in vain.

    Args:
        settings: what the user asked for.
        history: every attempt so far; the last one has failed.
        offers: the GPUs that may be had.
    """
    context = FailureContext(settings, history, offers)
    return _with_first_size(context, _decision(context))


def on_gpus(
    settings: PolicySettings, history: tuple[Attempt, ...], retry: Retry, gpus: Group
) -> Retry:
    """Return a decision to wait for room, now that these GPUs have it.

    Another number of GPUs than before shares the same effective batch.
    """
    spec = replace(retry.spec, gpus=gpus)
    if len(gpus) != spec.ranks:
        fewer = settings.for_ranks(len(gpus))
        # the largest that divides its share and is no larger than the one before; if none does,
        # one that divides it, since memory that runs out costs less than another effective batch
        size = fewer.next_smaller(2 * spec.batch_size)
        if fewer.share % size:
            size = fewer.asked.batch_size
        spec = fewer.resized(spec, size)
        spec = replace(spec, ranks=len(gpus))
    spec, _ = size_to_begin_with(settings, history, spec)
    return replace(retry, spec=spec)


def _decision(context: FailureContext) -> Decision:
    if (ruled := _by_rule(context)) is not None:
        return ruled
    if not_the_device := remedies.same_fault_elsewhere(context):
        return GiveUp(not_the_device)
    decision = _first_remedy(context, REMEDIES.get(context.failure.kind, ()))
    if isinstance(decision, GiveUp):
        return replace(decision, reason=decision.reason + _what_came_before(context))
    return decision


def _what_came_before(context: FailureContext) -> str:
    """Return the reason of the attempt before, if it was another one and no progress came since:
    the last attempt may have met what that one left behind."""
    failure = context.failure
    others = [
        attempt for attempt in context.since_progress[:-1] if attempt.message != failure.message
    ]
    # the end names the first time that nobody could name the failure by itself
    if not others or others[-1] == context.unknown_before:
        return ""
    before = others[-1]
    if before.kind is failure.kind is not FailureKind.BUG:
        return ""
    return f" (attempt {before.number} before it: {before.message})"


def _with_first_size(context: FailureContext, decision: Decision) -> Decision:
    """Return the decision with the batch that the first attempt on a kind of device begins with."""
    if isinstance(decision, GiveUp):
        return decision
    spec, why = size_to_begin_with(context.settings, context.history, decision.spec)
    otherwise = decision.otherwise and _with_first_size(context, decision.otherwise)
    reason = f"{decision.reason}; {why}" if why else decision.reason
    return replace(decision, spec=spec, reason=reason, otherwise=otherwise)


def concluded(attempt: Attempt, decision: Decision | None) -> Attempt:
    """Return the attempt with what was decided after it.

    An unclear lack of memory that no remedy has helped is a bug.
    """
    if decision is None:
        return replace(attempt, reason=attempt.message or attempt.outcome)
    failure = attempt.failure
    if (
        failure is not None
        and failure.evidence.clue == Clue.UNCLEAR
        and isinstance(decision, GiveUp)
    ):
        failure = replace(failure, kind=FailureKind.BUG, advice=())
    return replace(attempt, failure=failure, action=decision.action, reason=decision.reason)


def _first_remedy(context: FailureContext, rules: tuple[Rule, ...]) -> Decision:
    for number, rule in enumerate(rules, start=1):
        retry = rule(context)
        if retry is None or context.settings.refuses(retry.spec):
            continue
        if context.keeps_batch and not _has_same_split(retry, context):
            continue
        if retry.room is not None:
            return replace(retry, otherwise=_first_remedy(context, rules[number:]))
        return retry
    return GiveUp(_why_give_up(context))


def _has_same_split(retry: Retry, context: FailureContext) -> bool:
    specs = retry.spec, context.last
    splits = {(s.batch_size, s.gradient_accumulation_steps, s.ranks) for s in specs}
    # fewer GPUs take over the samples of the others
    return len(splits) == 1 and retry.action != "fewer_gpus"


def _why_give_up(context: FailureContext) -> str:
    """Return one sentence: what failed, and with what it was tried."""
    kind, message = context.failure.kind, context.failure.message
    if kind in (FailureKind.BUG, FailureKind.UNKNOWN) or context.evidence.clue == Clue.UNCLEAR:
        rank = context.failure.rank
        message = message if rank is None else f"{message} (rank {rank})"
        is_unknown = context.evidence.clue == Clue.UNKNOWN
        before = context.unknown_before
        if not is_unknown or before is None:
            return message
        first = ""
        if before.message != context.failure.message:
            first = f"; the first time: {before.message}"
        return (
            f"{message}: twice at the same place, with no later checkpoint in between, so it is "
            f"the program's{first}"
        )
    if kind.is_memory and context.failed_before_training:
        if context.evidence.clue == Clue.IMPORT:
            return f"out of memory while a module was imported: no smaller batch helps: {message}"
        return (
            "out of memory before the first step: model, optimizer and data do not fit, and a "
            f"smaller batch does not help: {message}"
        )
    if context.attempt.cuda_cannot_work:
        return cannot_work(context.failure)
    count = context.failures_without_progress
    if kind in (FailureKind.INTERRUPTED, FailureKind.DIVERGED):
        return f"{message}, {count} times without progress" if count > 1 else message
    if kind is FailureKind.COMM:
        is_hang = context.evidence.library == "robust_train"
        what = "hang" if is_hang else "network failure"
        attempts = "attempts" if count > 1 else "attempt"
        return f"{what}, {count} {attempts} without progress: giving up ({message})"
    tried: dict[str, list[str]] = {}
    for one in context.history:
        size = " down to ".join(map(str, one.sizes)) if one.spec.has_batch else ""
        tried.setdefault(one.spec.device, []).append(size)
    listed = "; ".join(
        f"{device} at micro-batch {', '.join(_counted(sizes))}" if any(sizes) else device
        for device, sizes in tried.items()
    )
    if not kind.is_memory:
        again = " again after every remedy" if len(context.history) > 1 else ""
        return f"{kind.in_words}{again} ({listed}): {message}"
    hint = ""
    if not context.config.allow_cpu_fallback:
        hint = " (allow_cpu_fallback is false)"
    can_halve = context.last.has_batch
    if context.has_smaller and context.settings.refuses(context.smaller):
        hint += "; a smaller micro-batch would change the effective batch size, which is kept"
    if not can_halve:
        is_project = context.config.theirs is not None
        why = _HAS_NO_BATCH if is_project else "the command has no {batch_size}"
        hint += f"; the batch was not halved: {why}"
    if can_halve and context.config.max_retries is not None and context.sizes_not_tried:
        left = ", ".join(map(str, context.sizes_not_tried))
        hint += f"; micro-batch {left} was not tried (max_retries={context.config.retries})"
    if context.keeps_loss:
        hint += f"; no step was split: {context.keeps_loss}"
    if context.keeps_batch:
        hint += f"; the batch was not split: {context.keeps_batch}"
    return f"out of memory on every device that may be used: {listed}{hint}"


_HAS_NO_BATCH = (
    "the project's config has no key that is known as the batch size of training; name it: "
    "robust.training.batch_size='${its.name}'"
)


def _counted(sizes: Sequence[str]) -> Iterator[str]:
    """Yield each size once, with how often it was tried in a row."""
    for size, group in itertools.groupby(sizes):
        times = len(list(group))
        yield size if times == 1 else f"{size} ({times} times)"


def cannot_work(failure: Failure) -> str:
    """Return in one line that CUDA works with no GPU here, and both ways on."""
    advice = "".join(f"; {one}" for one in failure.advice)
    return f"CUDA cannot work here: {failure.message}{advice}"


# --- the user's own rules -------------------------------------------------------------------------


def with_rule(settings: PolicySettings, earlier: tuple[Attempt, ...], attempt: Attempt) -> Attempt:
    """Return the attempt with the number of the user's rule that applies to it, if there is one.

    With the rule ``exclude_gpu`` it is a failure of the GPU.
    """
    failure = attempt.failure
    if failure is None:
        return attempt
    context = FailureContext(settings, earlier + (attempt,), Offers())
    for number, rule in enumerate(settings.config.retry.rules):
        has_tries = rule.then == "stop" or _tries(context, number) < _most(context, rule)
        if has_tries and _fits(rule, attempt) and _can(rule, context):
            break
    else:
        return attempt
    attempt = replace(attempt, rule=number)
    if rule.then != EXCLUDE_GPU:
        return attempt
    why = _why(replace(context, history=earlier + (attempt,)))
    evidence = replace(failure.evidence, clue=Clue.HARDWARE)
    fault = Failure(
        FailureKind.DEVICE_FAULT, f"{why}: {EXCLUDE_GPU}", evidence, failure.advice, failure.rank
    )
    return replace(attempt, failure=fault)


def _by_rule(context: FailureContext) -> Decision | None:
    """Return what the user's rule for this failure decides, None if the remedies do."""
    number = context.attempt.rule
    if number is None:
        return None
    why = _why(context)
    match context.config.retry.rules[number].then:
        case "stop":
            return GiveUp(f"{why}: stop")
        case "smaller_batch":
            return remedies.halved(context, "halve_batch", f"{why}: ")
        case "retry":
            pause = remedies.pause_before(context, _tries(context, number))
            reason = f"{why}: the same again in {pause:g} s"
            return Retry(context.last, "retry", reason, pause_seconds=pause)
    return None  # the remedies for a GPU whose hardware failed


def _why(context: FailureContext) -> str:
    """Return the failure, the rule that applies to it, and which try of the rule this is."""
    number = context.attempt.rule
    assert number is not None
    rule, which = context.config.retry.rules[number], ""
    if rule.then != "stop":
        which = f" ({_tries(context, number)} of {_most(context, rule)})"
    return f"{context.failure.message}; retry.rules[{number}]{which}"


def _tries(context: FailureContext, number: int) -> int:
    """Return how often a rule has been applied since the job got further."""
    return sum(attempt.rule == number for attempt in context.since_progress)


def _most(context: FailureContext, rule: RetryRule) -> int:
    return context.config.retries if rule.times is None else rule.times


def _fits(rule: RetryRule, attempt: Attempt) -> bool:
    failure = attempt.failure
    if failure is None or rule.exit_code not in (None, attempt.exit_code):
        return False
    names = {name for one in attempt.exceptions for name in (one, one.rpartition(".")[2])}
    if rule.exception and rule.exception not in names:
        return False
    texts = (failure.message, attempt.traceback or "", attempt.exit.output)
    # progress bars: one line of their thousands takes patterns like `.*a.*b` hours
    text = "\n".join(texts).replace("\r", "\n")
    return not rule.message or is_found(rule.message, text)


def _can(rule: RetryRule, context: FailureContext) -> bool:
    """Return whether what the rule demands is possible: else the next one, or a remedy, decides."""
    if rule.then == EXCLUDE_GPU:
        return bool(context.last.gpus)
    if rule.then != "smaller_batch":
        return True
    may_split = context.has_smaller and not context.keeps_batch
    return may_split and not context.settings.refuses(context.smaller)
