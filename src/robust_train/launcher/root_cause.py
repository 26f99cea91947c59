"""Which of several ranks' endings is the reason for the others. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from robust_train.model.events import Failed, Finished, RankDied
from robust_train.model.failure import FailureKind

_FOLLOWS_FROM_OTHERS = frozenset({FailureKind.COMM, FailureKind.INTERRUPTED})


@dataclass(frozen=True)
class RankEnd:
    """How one rank's process ended, or that it runs."""

    rank: int
    pid: int
    # the event of its end; None so far, or where it died without one
    ending: Finished | Failed | None
    # seconds of the monotonic clock: when it reported its end, else when it was seen dead
    at: float
    returncode: int | None = None  # as subprocess has it, None while it runs
    was_killed: bool = False  # it was killed because another had failed

    @property
    def kind(self) -> FailureKind | None:
        """The failure's kind by its own report, None without one."""
        return self.ending.failure.kind if isinstance(self.ending, Failed) else None

    @property
    def is_failure(self) -> bool:
        """Whether the rank itself failed, and was not killed because another had."""
        if self.ending is not None:
            return isinstance(self.ending, Failed)
        return not self.was_killed

    @property
    def others_know(self) -> bool:
        """Whether the other ranks end by themselves, after a last checkpoint."""
        failed = isinstance(self.ending, Failed) and self.ending.others_know
        return failed or self.kind is FailureKind.INTERRUPTED


def root_cause(ends: Sequence[RankEnd]) -> RankEnd | None:
    """Return the end that the others followed from; None if no rank failed.

    A rank that the kernel killed reports nothing, and its peers report a broken connection first:
    so SIGKILL comes before any report. After that the earliest one counts that is no consequence by
    its nature (a lost connection, a request to stop) or by its own report.
    """
    return min((end for end in ends if end.is_failure), key=_order, default=None)


def _order(end: RankEnd) -> tuple[int, float]:
    if not isinstance(end.ending, Failed):
        return (0 if end.returncode == -signal.SIGKILL else 1), end.at
    if end.ending.caused_by_rank is not None:
        return 2, end.at
    return (3 if end.kind in _FOLLOWS_FROM_OTHERS else 1), end.at


def event_of(ends: Sequence[RankEnd]) -> Finished | Failed | RankDied | None:
    """Return the one event of the end of several ranks; None if all that failed were killed."""
    figures = [end.ending.memory for end in ends if end.ending is not None]
    peaks = [one.get("max_allocated", one.get("max_resident", 0)) for one in figures]
    memory = figures[peaks.index(max(peaks))] if peaks else {}
    root = root_cause(ends)
    if root is None:
        first = ends[0].ending
        return None if first is None else replace(first, memory=memory)
    if not isinstance(root.ending, Failed):
        return RankDied(root.rank, root.pid, root.returncode or 0, memory)
    by = root.ending.caused_by_rank
    failure = replace(root.ending.failure, rank=root.rank if by is None else by)
    return replace(root.ending, failure=failure, memory=memory)
