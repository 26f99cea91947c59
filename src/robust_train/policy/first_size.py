"""Chooses the batch of the first attempt on a kind of device (``training.batch_size=auto``). Pure.

With ``auto``, a trainer function searches for its micro-batch size in the first step. A script or a
job of several ranks cannot search, so it starts with the whole effective batch and halves it when
memory runs out. In the launcher, ``policy.decide``, user rules and guests of an engine apply this
to each decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from robust_train.model.attempt import Attempt
from robust_train.model.parts import parts_like
from robust_train.model.spec import AttemptSpec, Decision, GiveUp, Knob
from robust_train.policy.settings import PolicySettings


def with_first_size(
    settings: PolicySettings, history: tuple[Attempt, ...], decision: Decision
) -> Decision:
    """Return the decision with the batch for the first attempt on its kind of device."""
    if isinstance(decision, GiveUp):
        return decision
    spec, why = choose_first_size(settings, history, decision.spec)
    otherwise = decision.otherwise
    if otherwise is not None:
        otherwise = with_first_size(settings, history, otherwise)
    reason = f"{decision.reason}; {why}" if why else decision.reason
    return replace(decision, spec=spec, reason=reason, otherwise=otherwise)


def choose_first_size(
    settings: PolicySettings, history: Sequence[Attempt], spec: AttemptSpec
) -> tuple[AttemptSpec, str]:
    """Return ``spec`` with the batch that an attempt starts with, and the reason for it.

    Once an attempt on this kind of device has shown which size fits, the batch stays as the policy
    chose it. The reason is empty if the batch is unchanged, or if the attempt searches for it.
    """
    spec = spec.with_batch(None, None)
    if not settings.config.finds_batch_size or _is_size_known(history, spec.device_kind):
        return spec, ""
    ranks = settings.for_ranks(spec.ranks)
    whole = ranks.resize(spec, ranks.share)
    config = settings.config
    knobs = [whole.of(kind) for kind in parts_like(Knob)]
    searching = whole.having(*(knob.for_unknown_size(config, whole) for knob in knobs))
    # A knob may start a search for the size, and then there is no fixed batch to explain.
    if searching != whole:
        return searching, ""
    what = "several processes" if config.traits.can_be_probed else "a script"
    return whole, (
        f"training.batch_size=auto: {what} cannot be probed: training starts with "
        f"{whole.batch_size} and halves when memory runs out"
    )


def _is_size_known(history: Sequence[Attempt], device_kind: str) -> bool:
    """Return whether an earlier attempt on this kind of device has shown which size fits."""
    for earlier in history:
        if earlier.spec.device_kind != device_kind:
            continue
        # An attempt without a failure has completed.
        if earlier.kind is None or earlier.kind.is_memory or earlier.has_begun:
            return True
        if earlier.noted("batch_size_found", None) is not None:
            return True
    return False
