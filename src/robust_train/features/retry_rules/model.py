"""Finds the user's rule that applies to a failure, and makes its decision. Pure.

In the launcher, ``retry_rules.launcher`` calls `with_rule` for each failure, and `decide_by_rule`
before any remedy. For example, with ``{exit_code: 3, then: retry, times: 5}`` a script that exits
with 3 is repeated up to five times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from robust_train.config.values import key
from robust_train.features.retry_rules.reading import read_rules
from robust_train.features.retry_rules.record import RuleNote
from robust_train.host.search import is_found
from robust_train.model.attempt import Attempt
from robust_train.model.failure import Clue, FailureKind
from robust_train.model.feature import FeatureKeys
from robust_train.model.spec import Decision, GiveUp, Retry, RetryRule
from robust_train.policy.context import FailureContext, Offers
from robust_train.policy.first_size import with_first_size
from robust_train.policy.retries import pause_before, retry_with_half
from robust_train.policy.settings import PolicySettings

_EXCLUDE_GPU = "exclude_gpu"


@dataclass(frozen=True)
class RetryKeys(FeatureKeys):
    """``retry``: the user's rules for failures."""

    group: ClassVar[str] = "retry"
    rules: tuple[RetryRule, ...] = key(
        (),
        "your own rules, which come first: the reaction to an exit code, message or exception",
        more="([recovery](recovery.md#your-own-rules))",
        accepts="list",
        written=[],
        read=read_rules,
    )

    def mistakes(self, config: Any) -> Iterator[str]:
        """Yield a message for each condition that this trainer's failures can never meet."""
        raises = config.traits.raises
        for number, rule in enumerate(self.rules):
            name = f"retry.rules[{number}]"
            if rule.exception and not raises:
                yield f"{name}.exception: a script raises none; use message or exit_code"
            if rule.exit_code is not None and raises:
                yield f"{name}.exit_code: a function has none; use exception"


def with_rule(settings: PolicySettings, earlier: tuple[Attempt, ...], attempt: Attempt) -> Attempt:
    """Return the attempt with the number of the user rule that applies to it. Without such a rule,
    the attempt stays unchanged.

    If the rule says ``exclude_gpu``, the failure becomes a hardware fault of the GPU.
    """
    failure = attempt.failure
    if failure is None:
        return attempt
    context = FailureContext(settings, earlier + (attempt,), Offers())
    number = _find_rule(context)
    if number is None:
        return attempt
    attempt = attempt.having(RuleNote(number))
    if settings.config.of(RetryKeys).rules[number].then != _EXCLUDE_GPU:
        return attempt
    why = _why(replace(context, history=earlier + (attempt,)))
    fault = replace(
        failure,
        kind=FailureKind.DEVICE_FAULT,
        message=f"{why}: {_EXCLUDE_GPU}",
        evidence=replace(failure.evidence, clue=Clue.HARDWARE),
    )
    return replace(attempt, failure=fault)


def _find_rule(context: FailureContext) -> int | None:
    """Return the number of the first rule that matches the last attempt, may be applied again, and
    can be followed."""
    for number, rule in enumerate(context.config.of(RetryKeys).rules):
        has_tries = rule.then == "stop" or _tries(context, number) < _most_tries(context, rule)
        if has_tries and _is_match(rule, context.attempt) and _can_follow(rule, context):
            return number
    return None


def decide_by_rule(settings: PolicySettings, history: tuple[Attempt, ...]) -> Decision | None:
    """Return the decision of the rule that applies to the last attempt, None if the remedies
    decide."""
    number = history[-1].of(RuleNote).rule
    if number is None:
        return None
    context = FailureContext(settings, history, Offers())
    decision = _follow_rule(context, number)
    if decision is None:
        return None
    return with_first_size(settings, history, decision)


def _follow_rule(context: FailureContext, number: int) -> Decision | None:
    """Return the decision of a user rule, None if the remedies decide."""
    why = _why(context)
    match context.config.of(RetryKeys).rules[number].then:
        case "stop":
            return GiveUp(f"{why}: stop")
        case "smaller_batch":
            return retry_with_half(context, f"{why}: ")
        case "retry":
            pause = pause_before(context, _tries(context, number))
            reason = f"{why}: the same again in {pause:g} s"
            return Retry(context.last, "retry", reason, pause_seconds=pause)
    # After exclude_gpu, the remedies for failed hardware decide.
    return None


def _why(context: FailureContext) -> str:
    """Return a text with the failure, the rule that applies, and how often it was applied."""
    number = context.attempt.of(RuleNote).rule
    assert number is not None
    rule = context.config.of(RetryKeys).rules[number]
    count = ""
    if rule.then != "stop":
        count = f" ({_tries(context, number)} of {_most_tries(context, rule)})"
    return f"{context.failure.message}; retry.rules[{number}]{count}"


def _tries(context: FailureContext, number: int) -> int:
    """Return how often a rule was applied since the last progress."""
    return sum(attempt.of(RuleNote).rule == number for attempt in context.since_progress)


def _most_tries(context: FailureContext, rule: RetryRule) -> int:
    return context.config.retries if rule.times is None else rule.times


def _is_match(rule: RetryRule, attempt: Attempt) -> bool:
    """Return whether an attempt's failure meets all conditions of a rule."""
    failure = attempt.failure
    if failure is None or rule.exit_code not in (None, attempt.exit_code):
        return False
    short_names = {exception.rpartition(".")[2] for exception in attempt.exceptions}
    names = short_names.union(attempt.exceptions)
    if rule.exception and rule.exception not in names:
        return False
    if not rule.message:
        return True
    texts = (failure.message, attempt.traceback or "", attempt.exit.output)
    # Each state of a progress bar gets its own line. On a line with thousands of states, a pattern
    # like `.*a.*b` would take hours.
    text = "\n".join(texts).replace("\r", "\n")
    return is_found(rule.message, text)


def _can_follow(rule: RetryRule, context: FailureContext) -> bool:
    """Return whether a rule can be followed. Otherwise the next rule, or a remedy, decides."""
    if rule.then == _EXCLUDE_GPU:
        return bool(context.last.gpus)
    if rule.then != "smaller_batch":
        return True
    if not context.has_smaller or context.keeps_batch or context.keeps_loss:
        return False
    return not context.settings.refuses(context.smaller)
