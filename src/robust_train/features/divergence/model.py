"""Keys and remedies for divergence: an earlier checkpoint, then a lower learning rate. Pure.

`assembly.load_remedies` orders the remedies, and ``policy.decide`` calls them in the launcher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from robust_train.config.values import FROM_0, FROM_1, key
from robust_train.features.divergence.record import DivergedFinding, DivergenceKnob, RepeatFinding
from robust_train.model.feature import FeatureKeys
from robust_train.model.spec import Retry
from robust_train.policy.context import FailureContext

# The factor by which each further try lowers the learning rate.
_LESS_LEARNING = 0.5


@dataclass(frozen=True)
class DivergenceKeys(FeatureKeys):
    """``divergence``: the reaction to a loss that is no longer finite."""

    group: ClassVar[str] = "divergence"
    action: str = key(
        "recover",
        "`recover`: return to an earlier checkpoint, if necessary with a lower learning rate; "
        "`ignore`: continue",
        more="([diverged](recovery.md#diverged))",
        choices=("recover", "ignore"),
    )
    patience: int = key(
        3,
        "training counts as diverged after this many reports in a row of a loss that is not finite",
        more="Or after three times as many updates in a row that `run.step` skipped",
        range=FROM_1,
    )
    spike_sigma: float = key(
        0.0,
        "a loss this many standard deviations above its running median is bad too; `0`: never",
        more="Training counts as diverged after ten times `patience` such reports in a row",
        range=FROM_0,
    )


def return_to_good_checkpoint(context: FailureContext) -> Retry | None:
    """Retry once from the last good checkpoint, because the data or chance may be the cause."""
    if not context.evidence.has_checkpoint or context.failures_without_progress > 1:
        return None
    same_factor = context.last.of(DivergenceKnob).lr_factor
    return _retry_from_good(context, "before_it_diverged", same_factor, "")


def lower_learning_rate(context: FailureContext) -> Retry | None:
    """Retry from the last good checkpoint, with a lower learning rate."""
    tries = context.failures_without_progress
    if context.evidence.has_checkpoint:
        # The first try kept the learning rate.
        tries -= 1
    if not context.evidence.of(RepeatFinding).reads_lr or tries > context.config.retries:
        return None
    lower = context.last.of(DivergenceKnob).lr_factor * _LESS_LEARNING
    change = f" with {lower:g} times the learning rate"
    return _retry_from_good(context, "lower_learning_rate", lower, change)


def _retry_from_good(context: FailureContext, action: str, lr_factor: float, change: str) -> Retry:
    """Return a retry from the last good checkpoint, or from the beginning if none exists.

    It skips the data of the bad steps if the trainer can skip data.
    """
    skips_to = 0
    skipped_data = ""
    if context.evidence.of(RepeatFinding).passes_over:
        skips_to = context.evidence.of(DivergedFinding).bad_step or 0
    if skips_to:
        skipped_data = f"; the data up to step {skips_to} is skipped"
    where = "from it" if context.evidence.has_checkpoint else "from the beginning"
    how = f": again {where}{change}{skipped_data}"
    return context.retry(action, how, DivergenceKnob(lr_factor, skips_to))
