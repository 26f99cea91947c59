"""Which of the user's rules applies to a failure, and its decision. Pure.

``retry_rules.launcher`` calls `with_rule` for the evidence of each failure, and `decided_by_rule`
before any remedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from robust_train.config.values import key
from robust_train.features.retry_rules.reading import retry_rules
from robust_train.features.retry_rules.record import RuleNote
from robust_train.host.search import is_found
from robust_train.model.attempt import Attempt
from robust_train.model.failure import Clue, Failure, FailureKind
from robust_train.model.feature import FeatureKeys
from robust_train.model.spec import Decision, GiveUp, Retry, RetryRule
from robust_train.policy.context import FailureContext, Offers
from robust_train.policy.decide import with_first_size
from robust_train.policy.retries import halved, pause_before
from robust_train.policy.sizes import PolicySettings

EXCLUDE_GPU = "exclude_gpu"


@dataclass(frozen=True)
class RetryKeys(FeatureKeys):
    """``retry``: the user's knowledge about failures."""

    group: ClassVar[str] = "retry"
    rules: tuple[RetryRule, ...] = key(
        (),
        "your own reactions to an exit code, message or exception; they precede ours",
        more="([recovery](recovery.md#your-own-rules))",
        accepts="list",
        written=[],
        read=retry_rules,
    )

    def mistakes(self, config: Any) -> Iterator[str]:
        """Yield the conditions that this trainer's failures can never meet."""
        raises = config.traits.raises
        for number, rule in enumerate(self.rules):
            name = f"retry.rules[{number}]"
            if rule.exception and not raises:
                yield f"{name}.exception: a script raises none; use message or exit_code"
            if rule.exit_code is not None and raises:
                yield f"{name}.exit_code: a function has none; use exception"


def with_rule(settings: PolicySettings, earlier: tuple[Attempt, ...], attempt: Attempt) -> Attempt:
    """Return the attempt with the number of the user rule that applies to it, if any.

    Under the rule ``exclude_gpu``, the failure counts as a failure of the GPU.
    """
    failure = attempt.failure
    if failure is None:
        return attempt
    context = FailureContext(settings, earlier + (attempt,), Offers())
    for number, rule in enumerate(settings.config.of(RetryKeys).rules):
        has_tries = rule.then == "stop" or _tries(context, number) < _most(context, rule)
        if has_tries and _fits(rule, attempt) and _can(rule, context):
            break
    else:
        return attempt
    attempt = attempt.having(RuleNote(number))
    if rule.then != EXCLUDE_GPU:
        return attempt
    why = _why(replace(context, history=earlier + (attempt,)))
    evidence = replace(failure.evidence, clue=Clue.HARDWARE)
    fault = Failure(
        FailureKind.DEVICE_FAULT, f"{why}: {EXCLUDE_GPU}", evidence, failure.advice, failure.rank
    )
    return replace(attempt, failure=fault)


def decided_by_rule(settings: PolicySettings, history: tuple[Attempt, ...]) -> Decision | None:
    """Return the rule's decision after the last attempt, None if the remedies decide."""
    number = history[-1].of(RuleNote).rule
    if number is None:
        return None
    context = FailureContext(settings, history, Offers())
    decision = _decision(context, number)
    if decision is None:
        return None
    return with_first_size(settings, history, decision)


def _decision(context: FailureContext, number: int) -> Decision | None:
    """Return the decision of a user rule, or None to leave it to the remedies."""
    why = _why(context)
    match context.config.of(RetryKeys).rules[number].then:
        case "stop":
            return GiveUp(f"{why}: stop")
        case "smaller_batch":
            return halved(context, f"{why}: ")
        case "retry":
            pause = pause_before(context, _tries(context, number))
            reason = f"{why}: the same again in {pause:g} s"
            return Retry(context.last, "retry", reason, pause_seconds=pause)
    return None  # exclude_gpu: the remedies for failed hardware decide


def _why(context: FailureContext) -> str:
    """Return the failure, the rule that applies to it, and the number of this try of the rule."""
    number = context.attempt.of(RuleNote).rule
    assert number is not None
    rule = context.config.of(RetryKeys).rules[number]
    which = ""
    if rule.then != "stop":
        which = f" ({_tries(context, number)} of {_most(context, rule)})"
    return f"{context.failure.message}; retry.rules[{number}]{which}"


def _tries(context: FailureContext, number: int) -> int:
    """Return how often a rule has been applied since the last progress."""
    return sum(attempt.of(RuleNote).rule == number for attempt in context.since_progress)


def _most(context: FailureContext, rule: RetryRule) -> int:
    return context.config.retries if rule.times is None else rule.times


def _fits(rule: RetryRule, attempt: Attempt) -> bool:
    failure = attempt.failure
    if failure is None or rule.exit_code not in (None, attempt.exit_code):
        return False
    short_names = {exception.rpartition(".")[2] for exception in attempt.exceptions}
    names = short_names.union(attempt.exceptions)
    if rule.exception and rule.exception not in names:
        return False
    texts = (failure.message, attempt.traceback or "", attempt.exit.output)
    # A progress bar may have thousands of parts on one line, on which patterns like `.*a.*b` take
    # hours.
    text = "\n".join(texts).replace("\r", "\n")
    return not rule.message or is_found(rule.message, text)


def _can(rule: RetryRule, context: FailureContext) -> bool:
    """Return whether a rule can be followed. Otherwise the next rule, or a remedy, decides."""
    if rule.then == EXCLUDE_GPU:
        return bool(context.last.gpus)
    if rule.then != "smaller_batch":
        return True
    is_kept = context.keeps_batch or context.keeps_loss
    may_split = context.has_smaller and not is_kept
    return may_split and not context.settings.refuses(context.smaller)
