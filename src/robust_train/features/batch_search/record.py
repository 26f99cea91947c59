"""Whether an attempt searches for its micro-batch, and the result of the search.

The launcher's policy sets the knob when no size is known, ``batch_search.attempt`` reads it in the
process that trains, and every reader of events folds the result into the note.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from robust_train.model.attempt import Attempt, Note
from robust_train.model.events import BatchSizeFound, Event
from robust_train.model.json import Json
from robust_train.model.spec import AttemptSpec, Knob

if TYPE_CHECKING:
    from robust_train.config.schema import RobustConfig


@dataclass(frozen=True)
class SearchKnob(Knob):
    """Whether the attempt finds its micro-batch before it trains."""

    behind = "accumulates"

    searches: bool = False

    def for_unknown_size(self, config: RobustConfig, spec: AttemptSpec) -> SearchKnob:
        """Return the choice to search, for a single process that calls ``run.backward``."""
        return SearchKnob(spec.ranks == 1 and config.traits.can_be_probed)

    def for_known_size(self) -> SearchKnob:
        """Return the choice not to search."""
        return SearchKnob()


@dataclass(frozen=True)
class BatchSearchNote(Note):
    """The result of the probes before training."""

    behind = "keeps_batch"
    folds = (BatchSizeFound,)

    batch_size_found: Mapping[str, Json] | None = None

    def after(self, event: Event, attempt: Attempt) -> BatchSearchNote:
        """Return the note with the figures of the search."""
        if isinstance(event, BatchSizeFound):
            return BatchSearchNote(event.figures)
        return self
