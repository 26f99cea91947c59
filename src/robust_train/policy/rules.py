"""The user's own rules (``retry.rules``): they come before the remedies. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from robust_train.failures.bounded_search import is_found
from robust_train.policy.context import FailureContext
from robust_train.policy.remedies import halved, pause_before
from robust_train.policy.sizes import PolicySettings
from robust_train.values import (
    Attempt,
    Clue,
    Decision,
    FailureKind,
    GiveUp,
    Outcome,
    Retry,
    RetryRule,
)

EXCLUDE_GPU = "exclude_gpu"


def by_users_rule(context: FailureContext) -> Decision | None:
    """Return what the first of the user's rules decides; None if none does."""
    found = _ruling(context)
    if found is None:
        return None
    rule, why, tries = found
    if rule.then == "stop":
        return GiveUp(f"{why}: stop")
    if rule.then == "smaller_batch":
        return halved(context, "halve_batch", f"{why}: micro-batch ")
    if rule.then == "retry":
        pause = pause_before(context.settings, tries)
        reason = f"{why}: the same again in {pause:g} s"
        return Retry(context.last, "retry", reason, pause_seconds=pause)
    return None  # the remedies for a GPU whose hardware failed


def with_gpu_at_fault(
    settings: PolicySettings, earlier: Sequence[Attempt], attempt: Attempt
) -> Attempt:
    """Return the attempt as one whose GPU failed, where the user's rule is ``exclude_gpu``."""
    failure = attempt.outcome.failure
    if failure is None:
        return attempt
    found = _ruling(FailureContext(settings, (*earlier, attempt), ()))
    if found is None or found[0].then != EXCLUDE_GPU:
        return attempt
    evidence = replace(failure.evidence, clue=Clue.HARDWARE)
    fault = FailureKind.DEVICE_FAULT
    failure = replace(failure, kind=fault, message=f"{found[1]}: {EXCLUDE_GPU}", evidence=evidence)
    return replace(attempt, outcome=replace(attempt.outcome, failure=failure))


def _ruling(context: FailureContext) -> tuple[RetryRule, str, int] | None:
    """Return the first rule that fits and has a try left, its reason, and which try it is."""
    tried: Counter[int] = Counter()
    found = None
    for later in reversed(range(len(context.since_progress))):
        then = replace(context, history=context.history[: len(context.history) - later])
        found = None
        for number, rule in enumerate(context.settings.rules):
            most = context.settings.max_retries if rule.times is None else rule.times
            has_tries = rule.then == "stop" or tried[number] < most
            if has_tries and _fits(rule, then.attempt.outcome) and _can(rule, then):
                tried[number] += 1
                which = "" if rule.then == "stop" else f" ({tried[number]} of {most})"
                why = f"{context.failure.message}; retry.rules[{number}]{which}"
                found = rule, why, tried[number]
                break
    return found


def _fits(rule: RetryRule, outcome: Outcome) -> bool:
    failure = outcome.failure
    if failure is None or outcome.stopped_for is not None:
        return False
    if rule.exit_code not in (None, outcome.exit_code):
        return False
    names = {name for one in outcome.exceptions for name in (one, one.rpartition(".")[2])}
    if rule.exception is not None and rule.exception not in names:
        return False
    texts = (failure.message, outcome.traceback or "", outcome.output)
    # progress bars: one line of their thousands takes patterns like `.*a.*b` hours
    text = "\n".join(texts).replace("\r", "\n")
    return rule.message is None or is_found(rule.message, text)


def _can(rule: RetryRule, context: FailureContext) -> bool:
    """Return whether what the rule wants is possible: else the next one, or a remedy, decides."""
    if rule.then == EXCLUDE_GPU:
        return bool(context.last.gpus)
    last = context.last
    has_smaller = last.has_batch and last.batch_size > context.settings.min_batch_size
    return rule.then != "smaller_batch" or (has_smaller and not context.keeps_batch)
