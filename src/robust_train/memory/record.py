"""Which samples a file of bounded size keeps, however long the attempt runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from robust_train.memory.samples import Sample


@dataclass(frozen=True)
class Limits:
    """How many samples are kept of one attempt.

    Attributes:
        first: of the training's beginning, all of them: they show how memory rises and falls with
            each micro-batch.
        between: spread evenly over the time since then.
        newest: all of them: they show what came before an attempt's end.
        slack: that may come on top before the record is gone through again.
    """

    first: int = 400
    between: int = 2000
    newest: int = 300
    slack: int = 1000

    @property
    def most(self) -> int:
        """Samples that a record never exceeds."""
        return self.first + self.between + self.newest + self.slack


@dataclass(frozen=True)
class Kept:
    """The samples that are kept, oldest first.

    Attributes:
        first: of the training's beginning.
        between: at least ``spacing`` seconds apart.
        newest: since then, all that came.
    """

    first: tuple[Sample, ...] = ()
    between: tuple[Sample, ...] = ()
    newest: tuple[Sample, ...] = ()
    spacing: float = 0.0

    def __len__(self) -> int:
        return len(self.first) + len(self.between) + len(self.newest)

    def samples(self) -> list[Sample]:
        """All of them in the order of time."""
        return sorted((*self.first, *self.between, *self.newest), key=lambda sample: sample.time)


def thinned(kept: Kept, limits: Limits) -> Kept:
    """``kept`` without what is more than ``limits`` allow.

    The samples that are no longer among the newest join those between, which become sparser, by
    half each time, until they are few enough.
    """
    cut = max(len(kept.newest) - limits.newest, 0)
    leaving, newest = kept.newest[:cut], kept.newest[cut:]
    room = limits.first - len(kept.first)
    # before the first step nothing trains yet; a download there may take an hour
    training = [sample for sample in leaving if sample.step is not None][: max(room, 0)]
    chosen = set(map(id, training))
    between = (*kept.between, *(sample for sample in leaving if id(sample) not in chosen))
    spacing = kept.spacing
    while len(between := _apart(between, spacing)) > limits.between:
        length = between[-1].time - between[0].time
        spacing = max(2 * spacing, length / (2 * limits.between), 1e-6)
    return replace(
        kept, first=(*kept.first, *training), between=between, newest=newest, spacing=spacing
    )


def _apart(samples: Sequence[Sample], spacing: float) -> tuple[Sample, ...]:
    chosen: list[Sample] = []
    for sample in samples:
        # a clock that was set back must not end the record
        if not chosen or not 0 <= sample.time - chosen[-1].time < spacing:
            chosen.append(sample)
    return tuple(chosen)
