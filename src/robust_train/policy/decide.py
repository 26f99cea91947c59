"""The decision after an attempt: a pure function of settings, history and GPUs.

The launcher's driver calls :func:`decide` after each failure. It takes the first remedy for the
failure's kind that offers a decision. Remedies are rules of features, and
``assembly.load_remedies`` loads their table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from robust_train.model.attempt import Attempt
from robust_train.model.failure import FailureKind
from robust_train.model.gpu import Group
from robust_train.model.spec import AttemptSpec, Decision, GiveUp, Retry
from robust_train.policy.context import FailureContext, Offers
from robust_train.policy.giving_up import what_came_before, why_give_up
from robust_train.policy.sizes import PolicySettings, size_to_begin_with

Rule = Callable[[FailureContext], Decision | None]
"""A reaction to a failure; None leaves the decision to the next rule."""

Remedies = Mapping[FailureKind, Sequence[Rule]]
"""The rules for each kind of failure, in order. A kind that is absent is never retried."""


def first_decision(settings: PolicySettings, gpus: Group) -> Retry:
    """Return the first attempt of a job on these GPUs, or on the CPU."""
    spec, why = size_to_begin_with(settings, (), first_attempt(settings, gpus))
    return Retry(spec, "start", why)


def first_attempt(settings: PolicySettings, gpus: Group) -> AttemptSpec:
    """Return the requested batch on these GPUs, or on the CPU."""
    requested = settings.for_ranks(len(gpus) or settings.cpu_ranks).asked
    return replace(requested, gpus=gpus)


def decide(
    settings: PolicySettings, remedies: Remedies, history: tuple[Attempt, ...], offers: Offers
) -> Decision:
    """Choose the next attempt, or give up.

    A retry that has to wait for room carries in ``otherwise`` the decision after a wait in vain.

    Args:
        settings: the user's settings.
        remedies: the rules to try.
        history: every attempt so far; the last attempt failed.
        offers: the GPUs that are available.
    """
    context = FailureContext(settings, history, offers)
    rules = remedies.get(context.failure.kind, ())
    decision = _first_remedy(context, rules)
    if decision is None:
        why = why_give_up(context) + what_came_before(context)
        decision = GiveUp(why)
    return with_first_size(settings, history, decision)


def on_gpus(
    settings: PolicySettings, history: tuple[Attempt, ...], retry: Retry, gpus: Group
) -> Retry:
    """Put the GPUs that have room now into a decision to wait for room.

    A different number of GPUs shares the same effective batch.
    """
    spec = shared_among(settings, replace(retry.spec, gpus=gpus), len(gpus))
    spec, _ = size_to_begin_with(settings, history, spec)
    return replace(retry, spec=spec)


def shared_among(settings: PolicySettings, spec: AttemptSpec, ranks: int) -> AttemptSpec:
    """Return a spec that shares the same effective batch among this many processes."""
    if ranks == spec.ranks:
        return spec
    shared = settings.for_ranks(ranks)
    # Take the largest size that divides the share and is not larger than before. If there is
    # none, take any size that divides it: running out of memory costs less than a changed
    # effective batch.
    size = shared.next_smaller(2 * spec.batch_size)
    if shared.accumulates and shared.share % size:
        size = shared.asked.batch_size
    return replace(shared.resized(spec, size), ranks=ranks)


def with_first_size(
    settings: PolicySettings, history: tuple[Attempt, ...], decision: Decision
) -> Decision:
    """Put the batch that the first attempt on a kind of device starts with into a decision."""
    if isinstance(decision, GiveUp):
        return decision
    spec, why = size_to_begin_with(settings, history, decision.spec)
    otherwise = decision.otherwise
    if otherwise is not None:
        otherwise = with_first_size(settings, history, otherwise)
    reason = f"{decision.reason}; {why}" if why else decision.reason
    return replace(decision, spec=spec, reason=reason, otherwise=otherwise)


def _first_remedy(context: FailureContext, rules: Sequence[Rule]) -> Decision | None:
    """Return the first offer that the settings allow, or None if no rule has one."""
    for number, rule in enumerate(rules, start=1):
        decision = rule(context)
        if decision is None:
            continue
        if isinstance(decision, GiveUp):
            return decision
        if context.settings.refuses(decision.spec):
            continue
        if context.keeps_batch and not _has_same_split(decision, context):
            continue
        if decision.room is None:
            return decision
        otherwise = _first_remedy(context, rules[number:])
        if otherwise is None:
            otherwise = GiveUp(why_give_up(context))
        return replace(decision, otherwise=otherwise)
    return None


def _has_same_split(retry: Retry, context: FailureContext) -> bool:
    specs = retry.spec, context.last
    splits = {(s.batch_size, s.gradient_accumulation_steps, s.ranks) for s in specs}
    # Fewer GPUs take over the samples of the others.
    return len(splits) == 1 and retry.action != "fewer_gpus"
