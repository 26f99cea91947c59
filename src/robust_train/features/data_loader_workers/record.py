"""The data-loader workers in an attempt's spec and record.

The launcher chooses the knob, counts the workers, and adds note and finding. The remedies in
`.model` read them.
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

    behind = "ranks"

    num_workers: int = 0  # data-loader workers of each rank
    prefetch_factor: int = 2  # batches that each worker prepares ahead

    @classmethod
    def asked(cls, config: RobustConfig, environ: Mapping[str, str]) -> WorkersKnob:
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
    """The data-loader workers among the processes of an attempt that has ended."""

    name = "workers_seen"
    is_journaled = False
    count: int
    hold_most: bool


@dataclass(frozen=True)
class WorkersNote(Note):
    """The workers that the launcher saw, None if unknown. Files contain them only as a finding of a
    failure."""

    folds = (WorkersSeen,)

    workers_seen: int | None = None
    they_held_most: bool | None = None

    def after(self, event: Event, attempt: Attempt) -> WorkersNote:
        """Return the note after workers were seen."""
        if not isinstance(event, WorkersSeen):
            return self
        return WorkersNote(event.count, event.hold_most)


@dataclass(frozen=True)
class WorkersFinding(Finding):
    """The data-loader workers when host memory ran out, or when a worker died."""

    behind = "library"

    # Whether the trainer did not read the number of workers in its config.
    no_workers: bool = False
    workers: int | None = None  # data-loader workers among the attempt's processes
    # Whether the workers held most of the memory that ran out, None if unknown.
    workers_hold_most: bool | None = None
