"""Merges the ends of several ranks into one, which shows the rank that failed first, and why.

In the launcher's process, :mod:`.running_attempt` uses it for the ranks that it started, and
:mod:`.rank_failures` for the ranks that an engine started. Everything here is pure.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from robust_train.model.events import Failed, Finished, RankDied
from robust_train.model.failure import FailureKind


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended, or that it still runs."""

    rank: int
    pid: int = 0
    # The event that the rank sent at its end. None while it runs, or if it died silently.
    ending: Finished | Failed | None = None
    # When the rank reported its end, otherwise when the launcher found it dead, in seconds.
    at: float = 0.0
    returncode: int | None = None  # as `subprocess` returns it; None while the rank runs
    was_killed: bool = False  # whether the launcher killed it because another rank had failed

    @property
    def is_over(self) -> bool:
        """Whether the rank has reported its end, or has died."""
        return self.ending is not None or self.returncode is not None

    @property
    def is_failure(self) -> bool:
        """Whether the rank itself failed, and was not killed because another rank had failed."""
        if self.ending is not None:
            return isinstance(self.ending, Failed)
        return self.is_over and not self.was_killed

    @property
    def was_stopped(self) -> bool:
        """Whether a signal stopped the rank."""
        if not isinstance(self.ending, Failed):
            return False
        return self.ending.failure.kind is FailureKind.INTERRUPTED

    @property
    def others_know(self) -> bool:
        """Whether the other ranks know of this end, and end by themselves after a checkpoint."""
        return self.was_stopped or getattr(self.ending, "others_know", False)

    @property
    def report(self) -> Failed | None:
        """The rank's report of its failure, which names the rank where the failure began."""
        if not isinstance(self.ending, Failed):
            return None
        rank = self.ending.caused_by_rank
        if rank is None:
            rank = self.rank
        failure = replace(self.ending.failure, rank=rank)
        return replace(self.ending, failure=failure)

    @property
    def order(self) -> tuple[int, float]:
        """Sort key: the end with the smallest key caused the other ends.

        0. The kernel killed the rank. Such a rank reports nothing, and its peers report a broken
           connection before the launcher finds it dead.
        1. The rank failed by itself: the earliest such end counts.
        2. The rank reports that another rank caused its failure.
        3. The rank left no evidence.
        4. The failure is of a kind that follows from another rank's failure: a lost connection, or
           a request to stop.
        """
        if not isinstance(self.ending, Failed):
            priorities = {-signal.SIGKILL: 0, None: 3}
            priority = priorities.get(self.returncode, 1)
        elif self.ending.caused_by_rank is not None:
            priority = 2
        elif self.ending.failure.kind.follows_from_others:
            priority = 4
        else:
            priority = 1
        return priority, self.at


def find_root_cause(ends: Sequence[RankEnd]) -> RankEnd | None:
    """Return the end that caused the others, or None if no rank failed."""
    failed = (end for end in ends if end.is_failure)
    return min(failed, key=lambda end: end.order, default=None)


def merge_ends(ends: Sequence[RankEnd]) -> Finished | Failed | RankDied | None:
    """Merge the ends of several ranks into a single event.

    Returns:
        The merged event, or None if no rank failed and rank 0 reported nothing.
    """
    figures = (end.ending.memory for end in ends if end.ending is not None)
    memory = max(figures, key=_peak_in, default={})
    root = find_root_cause(ends)
    rank_0 = ends[0].ending
    # If rank 0 has finished and the others were only stopped, the result of rank 0 counts.
    has_result = isinstance(rank_0, Finished) and all(
        end.was_stopped for end in ends if end.is_failure
    )
    if root is None or has_result:
        if rank_0 is None:
            return None
        return replace(rank_0, memory=memory)
    if root.report is None:
        return RankDied(root.rank, root.pid, root.returncode or 0, memory)
    return replace(root.report, memory=memory)


def _peak_in(figures: Mapping[str, int]) -> int:
    """Return a rank's peak memory on its GPU, or on the host if it used no GPU."""
    return figures.get("max_allocated", figures.get("max_resident", 0))
