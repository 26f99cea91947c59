"""Decides what follows a failed attempt: a retry, or giving up. Pure.

The launcher's driver calls :func:`decide` after each failure. Each kind of failure has an ordered
list of remedies, and the first remedy that returns a decision is followed. Remedies are rules of
features, and ``assembly.load_remedies`` loads their table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from robust_train.model.attempt import Attempt
from robust_train.model.failure import FailureKind
from robust_train.model.gpu import Group
from robust_train.model.spec import AttemptSpec, Decision, GiveUp, Retry
from robust_train.policy.context import FailureContext, Offers
from robust_train.policy.first_size import choose_first_size, with_first_size
from robust_train.policy.giving_up import describe_previous_failure, why_give_up
from robust_train.policy.settings import PolicySettings

Rule = Callable[[FailureContext], Decision | None]
"""A remedy: a reaction to a failure. None leaves the decision to the next rule."""

Remedies = Mapping[FailureKind, Sequence[Rule]]
"""The rules for each kind of failure, in order. A kind without rules is never retried."""


def first_decision(settings: PolicySettings, gpus: Group) -> Retry:
    """Return the decision to start a job on these GPUs, or on the CPU if there are none."""
    spec, why = choose_first_size(settings, (), first_attempt(settings, gpus))
    return Retry(spec, "start", why)


def first_attempt(settings: PolicySettings, gpus: Group) -> AttemptSpec:
    """Return the spec with the requested batch on these GPUs, or on the CPU if there are none."""
    ranks = len(gpus) or settings.cpu_ranks
    return replace(settings.for_ranks(ranks).asked, gpus=gpus)


def decide(
    settings: PolicySettings, remedies: Remedies, history: tuple[Attempt, ...], offers: Offers
) -> Decision:
    """Choose the next attempt, or give up.

    If a retry waits for free memory, its ``otherwise`` is the decision to follow if the wait fails.

    Args:
        settings: the user's settings.
        remedies: the rules for each kind of failure.
        history: every attempt so far. The last attempt failed.
        offers: the GPUs for the next attempt.
    """
    context = FailureContext(settings, history, offers)
    rules = remedies.get(context.failure.kind, ())
    decision = _apply_rules(context, rules)
    if decision is None:
        decision = GiveUp(why_give_up(context) + describe_previous_failure(context))
    return with_first_size(settings, history, decision)


def _apply_rules(context: FailureContext, rules: Sequence[Rule]) -> Decision | None:
    """Return the first decision of a rule that the settings allow, or None if there is none."""
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
        otherwise = _apply_rules(context, rules[number:])
        if otherwise is None:
            otherwise = GiveUp(why_give_up(context))
        return replace(decision, otherwise=otherwise)
    return None


def _has_same_split(retry: Retry, context: FailureContext) -> bool:
    """Return whether a retry splits the batch as the last attempt did."""
    if retry.action == "fewer_gpus":
        # Each remaining GPU takes more samples.
        return False
    old = context.last
    new = retry.spec
    is_same_batch = new.batch_size == old.batch_size
    is_same_accumulation = new.gradient_accumulation_steps == old.gradient_accumulation_steps
    return is_same_batch and is_same_accumulation and new.ranks == old.ranks


def place_on_gpus(
    settings: PolicySettings, history: tuple[Attempt, ...], retry: Retry, gpus: Group
) -> Retry:
    """Return a retry that waited for free memory, on the GPUs that have it now.

    If their number differs from the last attempt's, they share the same effective batch.
    """
    spec = share_among(settings, replace(retry.spec, gpus=gpus), len(gpus))
    spec, _ = choose_first_size(settings, history, spec)
    return replace(retry, spec=spec)


def share_among(settings: PolicySettings, spec: AttemptSpec, ranks: int) -> AttemptSpec:
    """Return a spec that shares the same effective batch among this many processes."""
    if ranks == spec.ranks:
        return spec
    shared = settings.for_ranks(ranks)
    # Take the largest size that divides the share and is not larger than before. If there is no
    # such size, take a larger size that divides it: running out of memory costs less than a
    # changed effective batch.
    size = shared.next_smaller(2 * spec.batch_size)
    if shared.accumulates and shared.share % size:
        size = shared.asked.batch_size
    return replace(shared.resize(spec, size), ranks=ranks)
