"""The key of expandable segments, and the remedies that turn them on or off.

`assembly.load_remedies` orders the remedies, and ``policy.decide`` calls them in the launcher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from robust_train.config.values import AUTO, key
from robust_train.features.expandable_segments.record import SegmentsKnob
from robust_train.model.failure import Clue
from robust_train.model.feature import FeatureKeys
from robust_train.model.spec import Retry
from robust_train.policy.context import FailureContext
from robust_train.readable import mib


@dataclass(frozen=True)
class SegmentsKeys(FeatureKeys):
    """``memory.expandable_segments``."""

    group: ClassVar[str] = "memory"
    expandable_segments: bool | None = key(
        None,
        "CUDA allocator setting against fragmentation",
        more="`auto`: on for a function on one GPU, off for scripts, several GPUs and WSL; an "
        "exported variable takes precedence",
        choices=(AUTO, True, False),
        written=AUTO,
    )


def turn_on_expandable_segments(context: FailureContext) -> Retry | None:
    """Retry with expandable segments if the allocator holds enough memory, but in pieces that are
    too small."""
    last = context.last
    refusals = (Clue.DRIVER, Clue.SEGMENTS)
    is_refused = any(attempt.evidence.clue in refusals for attempt in context.history)
    if is_refused or not context.settings.may_use_expandable_segments:
        return None
    has_them = last.of(SegmentsKnob).expandable_segments
    if not last.gpus or has_them or not context.evidence.fragmented:
        return None
    unused = mib(context.evidence.reserved_unallocated_bytes or 0)
    how = f" with {unused} reserved but unused: fragmentation; same batch with expandable segments"
    return context.retry("expandable_segments", how, SegmentsKnob(expandable_segments=True))


def turn_off_expandable_segments(context: FailureContext) -> Retry | None:
    """Retry once without expandable segments, because WSL2 and some vGPUs fail at the first
    allocation with them."""
    last = context.last
    may_choose = context.settings.may_use_expandable_segments
    if not last.gpus or not last.of(SegmentsKnob).expandable_segments or not may_choose:
        return None
    clue = context.evidence.clue
    if clue == Clue.SEGMENTS:
        how = ": the same again without expandable segments, which alone cause this"
    elif clue == Clue.DRIVER and not context.attempt.has_begun:
        how = (
            " before the first step: the same again without expandable segments, which this driver "
            "may not support"
        )
    else:
        return None
    return context.retry("no_expandable_segments", how, SegmentsKnob(expandable_segments=False))
