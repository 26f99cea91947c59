"""Which micro-batch to use: smaller when memory runs out, larger again only when asked."""

from __future__ import annotations

from typing import TypedDict

from robust_train.policy.sizes import next_smaller, settings_of_batch


class SizeState(TypedDict, total=False):
    """What a checkpoint keeps of :class:`MicroBatchSize`."""

    requested: int | None
    current: int | None
    failures: list[list[int]]
    clean_steps: int
    limit: int | None
    found: int | None


class MicroBatchSize:
    """The size in use, and what is known about others. Samples throughout. It shrinks as the
    launcher's does: at most half, at least ``min_batch_size``, a divisor of the effective batch
    where there is one."""

    def __init__(
        self,
        batch_size: int | None,  # to begin with; None: as many as the first batch has
        *,
        min_batch_size: int = 1,  # never less
        # for the effective batch, whose divisors are preferred
        gradient_accumulation_steps: int = 1,
        # steps without running out of memory after which the next larger size is tried; each
        # failure of a size doubles its wait. None or 0: never.
        regrow_after_steps: int | None = None,
    ) -> None:
        self.current = batch_size
        self._min = min_batch_size
        self._accumulation = gradient_accumulation_steps
        self._requested = batch_size
        self._regrow_after = regrow_after_steps or 0
        self._failures: dict[int, int] = {}
        self._clean_steps = 0
        self._limit: int | None = None
        self._found: int | None = None
        self._largest_batch = 0

    @property
    def tried(self) -> tuple[int, ...]:
        """Sizes at which memory ran out, the largest first."""
        return tuple(sorted(self._failures, reverse=True))

    def for_batch(self, samples: int) -> int:
        """Return the most samples in one part of a batch of ``samples``."""
        self._largest_batch = max(self._largest_batch, samples)
        return samples if self.current is None else min(self.current, samples)

    def begin_at(self, size: int | None) -> None:
        """Use what probes have found to fit, and never more; None changes nothing."""
        if size is not None:
            self.current = self._found = self._limit = size

    def smaller_than(self, failed: int) -> int | None:
        """Return the next smaller size, None if ``failed`` is the smallest."""
        if failed <= self._min:
            return None
        settings = settings_of_batch(
            max(self._requested or failed, failed),
            self._accumulation,
            min_batch_size=self._min,
        )
        return next_smaller(settings, failed)[0]

    def failed_at(self, size: int) -> None:
        """Record that memory ran out at ``size``: use the next smaller one, if any."""
        self._count_failure(size)
        self.current = self.smaller_than(size) or self.current

    def shrink(self) -> tuple[int, int] | None:
        """Use the next smaller size on request, and never more again: (from, to), or None."""
        before = (
            min(self.current or self._largest_batch, self._largest_batch)
            or self.current
        )
        smaller = None if before is None else self.smaller_than(before)
        if before is None or smaller is None:
            return None
        self.current = self._limit = smaller
        self._clean_steps = 0
        return before, smaller

    def agree(
        self, size: int | None, *, failed: int = 0, is_known: bool = False
    ) -> None:
        """Take over what several ranks have agreed on.

        Args:
            size: most samples in a part from now on; None: the whole batch.
            failed: the size at which memory ran out on some rank, 0 where it did not.
            is_known: that was here, and :meth:`failed_at` was called.
        """
        if failed and not is_known:
            self._count_failure(failed)
        if size is not None and (self.current is None or size < self.current):
            self.current = size
            if not failed:  # it was requested on another rank
                self._limit = size
                self._clean_steps = 0

    def step_done(self) -> tuple[int, int] | None:
        """Count an optimizer step; return (from, to) if the size grows for the next one."""
        if not self._regrow_after or self.current is None:
            return None
        self._clean_steps += 1
        known = {*self._failures, self._requested or 0}
        most = self._limit or max(known)
        larger = min(
            (size for size in known if self.current < size <= most), default=None
        )
        if larger is None:
            return None
        times_failed = self._failures.get(larger, 1)
        if self._clean_steps < self._regrow_after * 2 ** (times_failed - 1):
            return None
        before, self.current = self.current, larger
        self._clean_steps = 0
        return before, larger

    def state(self) -> SizeState:
        """Return it for a checkpoint."""
        return {
            "requested": self._requested,
            "current": self.current,
            "failures": [list(item) for item in self._failures.items()],
            "clean_steps": self._clean_steps,
            "limit": self._limit,
            "found": self._found,
        }

    def restore(self, state: SizeState) -> None:
        """Take over :meth:`state`'s result, unless another size was requested since."""
        # what probes had found is requested by its number afterwards
        if self._requested not in (state["requested"], state.get("found")):
            return
        self.current = state["current"]
        self._failures = {int(size): int(times) for size, times in state["failures"]}
        self._clean_steps = state["clean_steps"]
        self._limit = state.get("limit")

    def _count_failure(self, size: int) -> None:
        self._failures[size] = self._failures.get(size, 0) + 1
        self._clean_steps = 0
