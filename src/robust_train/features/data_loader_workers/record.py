"""The data-loader workers in an attempt's spec, in its record, and in the finding of its failure.

All of these exist in the launcher only. :mod:`.launcher` counts the workers of an attempt and adds
the note and the finding. The remedies in :mod:`.model` read the finding and choose the next knob.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from robust_train.model.attempt import Attempt, Note
from robust_train.model.events import Event
from robust_train.model.failure import Finding
from robust_train.model.spec import Knob

if TYPE_CHECKING:
    from robust_train.config.schema import RobustConfig


@dataclass(frozen=True)
class WorkersKnob(Knob):
    """The number of data-loader workers, and of batches that they prefetch."""

    written_after = "ranks"

    num_workers: int = 0  # data-loader workers of each rank
    prefetch_factor: int = 2  # batches that each worker prepares ahead

    @classmethod
    def from_config(cls, config: RobustConfig, environ: Mapping[str, str]) -> WorkersKnob:
        """Return the values of the keys under ``training``."""
        return cls(config.training.num_workers, config.training.prefetch_factor)

    def apply_to_config(self, config: RobustConfig) -> RobustConfig:
        """Return the config with these keys."""
        training = replace(
            config.training, num_workers=self.num_workers, prefetch_factor=self.prefetch_factor
        )
        return replace(config, training=training)


@dataclass(frozen=True)
class WorkersSeen(Event):
    """The data-loader workers of an attempt, as last counted by the launcher. Sent at its end."""

    name = "workers_seen"
    is_journaled = False
    count: int
    hold_most: bool  # whether the workers held most of the attempt's host memory


@dataclass(frozen=True)
class WorkersNote(Note):
    """The workers that the launcher saw. Files contain them only as the finding of a failure."""

    folds = (WorkersSeen,)

    workers_seen: int | None = None  # their number, None if unknown
    they_held_most: bool | None = None  # whether they held most of the memory, None if unknown

    def after(self, event: Event, attempt: Attempt) -> WorkersNote:
        """Return the note with the counted workers."""
        if not isinstance(event, WorkersSeen):
            return self
        return WorkersNote(event.count, event.hold_most)


@dataclass(frozen=True)
class WorkersFinding(Finding):
    """The data-loader workers when host memory ran out, or when a worker died."""

    written_after = "library"

    # Whether the trainer never read the number of workers in its config.
    no_workers: bool = False
    workers: int | None = None  # data-loader workers among the attempt's processes
    # Whether the workers held most of the memory that ran out, None if unknown.
    workers_hold_most: bool | None = None
