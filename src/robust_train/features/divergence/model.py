"""The keys of divergence, and its remedies: an earlier checkpoint, then a lower learning rate.

`assembly.load_remedies` orders them, and ``policy.decide`` calls them in the launcher. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from robust_train.config.values import FROM_0, FROM_1, key
from robust_train.features.divergence.record import DivergedFinding, DivergenceKnob, RepeatFinding
from robust_train.model.feature import FeatureKeys
from robust_train.model.spec import Retry
from robust_train.policy.context import FailureContext

_LESS_LEARNING = 0.5


@dataclass(frozen=True)
class DivergenceKeys(FeatureKeys):
    """``divergence``: the reaction to a loss that is no longer finite."""

    group: ClassVar[str] = "divergence"
    action: str = key(
        "recover",
        "`recover`: go back, with a lower learning rate if necessary; `ignore`: continue",
        more="([diverged](recovery.md#diverged))",
        choices=("recover", "ignore"),
    )
    patience: int = key(
        3,
        "training counts as diverged after this many reports in a row of a loss that is not finite",
        more="Or after three times as many updates in a row that `run.step` has left out",
        range=FROM_1,
    )
    spike_sigma: float = key(
        0.0,
        "a loss this many standard deviations above its running median is bad too; `0`: off",
        more="In ten times `patience` reports in a row",
        range=FROM_0,
    )


def before_it_diverged(context: FailureContext) -> Retry | None:
    """Retry once from the last good checkpoint: data or chance may have been the cause."""
    if not context.evidence.has_checkpoint or context.failures_without_progress > 1:
        return None
    return _back(context, "before_it_diverged", context.last.of(DivergenceKnob).lr_factor, "")


def lower_learning_rate(context: FailureContext) -> Retry | None:
    """Retry from the last good checkpoint, with a lower learning rate."""
    tries = context.failures_without_progress - context.evidence.has_checkpoint
    if not context.evidence.of(RepeatFinding).reads_lr:
        return None
    if tries > context.config.retries:
        return None
    lower = context.last.of(DivergenceKnob).lr_factor * _LESS_LEARNING
    return _back(context, "lower_learning_rate", lower, f" with {lower:g} times the learning rate")


def _back(context: FailureContext, action: str, lr_factor: float, with_less: str) -> Retry:
    bad = context.evidence.of(DivergedFinding).bad_step or 0
    skips = bad if context.evidence.of(RepeatFinding).passes_over else 0
    data = f"; the data up to step {skips} is skipped" if skips else ""
    where = "from it" if context.evidence.has_checkpoint else "from the beginning"
    how = f": again {where}{with_less}{data}"
    return context.retry(action, how, DivergenceKnob(lr_factor, skips))
