"""The size of the parts of a step, and the sizes at which memory ran out.

The batcher has a :class:`MicroBatchSize` for training and another for validation, in the process
that trains. The engine reports to it when memory runs out. Sizes are numbers of samples.
"""

from __future__ import annotations

import math
from typing import Any

from robust_train.config.training_plans import MicroBatchPlan

SizeState = dict[str, Any]
"""The state of a `MicroBatchSize` in a checkpoint."""


class MicroBatchSize:
    """The maximum number of samples in a part, and the sizes at which memory ran out.

    After a failure the size is halved, rounded up, but not below the plan's minimum. It never
    grows.

    Attributes:
        current: the size in use. None: the whole batch.
    """

    def __init__(self, plan: MicroBatchPlan) -> None:
        self._plan = plan
        self.current = plan.batch_size
        self._failures = set[int]()  # sizes at which memory ran out
        self._found: int | None = None  # the size that probes found
        self._largest_batch = 0

    @property
    def refuses_lone_samples(self) -> bool:
        """Whether the user's minimum is above 1."""
        return self._plan.min_batch_size > 1

    @property
    def tried(self) -> tuple[int, ...]:
        """Sizes at which memory ran out, the largest first."""
        return tuple(sorted(self._failures, reverse=True))

    def for_batch(self, samples: int) -> int:
        """Return the maximum size of a part of a batch with this number of samples, at least 1."""
        self._largest_batch = max(self._largest_batch, samples)
        return max(min(self.current or samples, samples), 1)

    def begin_at(self, size: int | None) -> None:
        """Use the size that probes found, and never a larger size. None changes nothing."""
        if size is not None:
            self.current = size
            self._found = size

    def smaller_than(self, failed: int) -> int | None:
        """Return the next smaller size, or None if ``failed`` is the smallest."""
        least = self._plan.min_batch_size
        if failed <= least:
            return None
        # The size need not divide the batch: if 4 of 5 samples fit, the parts have 3 and 2.
        return max(-(-failed // 2), least)

    def record_failure(self, size: int) -> None:
        """Record that memory ran out at ``size``, and use the next smaller size, if any."""
        self._failures.add(size)
        self.current = self.smaller_than(size) or self.current

    def shrink(self) -> tuple[int, int] | None:
        """Use the next smaller size on request.

        Returns:
            The sizes before and after, or None if no smaller size is left.
        """
        before = self.current or self._largest_batch
        if self._largest_batch:
            before = min(before, self._largest_batch)
        smaller = self.smaller_than(before)
        if smaller is None:
            return None
        self.agree(smaller)
        return before, smaller

    def agree(self, size: int | None, *, failed: int = 0, is_known: bool = False) -> None:
        """Use the size that several ranks have agreed on.

        Args:
            size: the maximum size of a part from now on. None: the whole batch.
            failed: the size at which memory ran out on some rank, or 0.
            is_known: whether memory ran out on this rank, so that `record_failure` was called.
        """
        if failed and not is_known:
            self.record_failure(failed)
        if size is not None and size < (self.current or math.inf):
            self.current = size

    def state(self) -> SizeState:
        """Return the state for a checkpoint."""
        return {
            "requested": self._plan.batch_size,
            "current": self.current,
            "failures": sorted(self._failures),
            "found": self._found,
        }

    def restore(self, state: SizeState) -> None:
        """Restore a result of `state`, unless another size has been requested since."""
        requested = self._plan.batch_size
        before = state["requested"]
        # The attempts after a search request the size that the search found.
        if requested in (before, state.get("found") or before):
            self.current = state["current"]
            self._failures = set(state["failures"])
            self._found = state.get("found")
