"""Applies the keys under ``memory:`` to a running attempt, in the process that trains.

`MemoryUpkeep` sets the memory limit, empties the CUDA cache when that pays off, warns if memory is
nearly full, and records what filled the memory if it runs out. The runner calls its hooks.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import time
from collections.abc import Callable

import psutil

from robust_train.attempt.hooks import InAttempt
from robust_train.attempt.live import LiveAttempt
from robust_train.config.schema import RobustConfig
from robust_train.failures import classify_failure
from robust_train.features.memory_upkeep.model import CacheKeys, ClearKeys, SnapshotKeys
from robust_train.host.memory import resident_bytes
from robust_train.memory.clearing import release_memory, return_memory
from robust_train.memory.cuda import (
    Cached,
    alloc_retries,
    busiest_gpu,
    cached_on,
    device_index,
    started_torch,
)
from robust_train.memory.limits import limit_when_cuda_starts
from robust_train.memory.reports import record_history_after_an_oom, write_out_of_memory
from robust_train.model.errors import RankFailure
from robust_train.model.events import MemoryCleared, MemoryTight
from robust_train.model.failure import Failure
from robust_train.readable import MIB, mib

log = logging.getLogger("robust_train")

_RESERVE_BYTES = 16 * MIB
_LONGEST_GAP = 100_000  # steps between two checks of the cache
_TIGHT_STEPS = 2  # steps in a row after which the warning about full memory appears
# torch records the history of allocations for this many steps, because it slows training down.
_STEPS_WITH_HISTORY = 300


class Reserve:
    """A few MiB of address space, released when host memory runs out to make room for the record of
    the failure. Their pages are never touched, so they take no memory."""

    def __init__(self) -> None:
        self._pages: mmap.mmap | None = None

    def hold(self) -> None:
        """Reserve the memory if it is not reserved yet and there is room."""
        if self._pages is None:
            with contextlib.suppress(OSError):
                self._pages = mmap.mmap(-1, _RESERVE_BYTES, flags=mmap.MAP_PRIVATE)

    def release(self) -> None:
        """Free the memory."""
        if self._pages is not None:
            self._pages.close()
            self._pages = None


class CacheChecks:
    """Decides after which steps, saves or epochs the CUDA cache is emptied.

    The cache is emptied if at least ``threshold`` of it is unused. If training then needs the
    memory again, it has to request it from the driver, which is slow. So the gap to the next check
    doubles each time the cache is emptied. A check that finds less unused memory resets the
    gap.
    """

    def __init__(
        self,
        every: int,  # the gap between two checks, 0 for no checks
        threshold: float,
    ) -> None:
        self._every = every
        self._threshold = threshold
        self._gap = every
        self._left = every  # steps, saves or epochs until the next check

    def should_empty(self, unused_share: Callable[[], float]) -> bool:
        """Count a step, save or epoch, and return whether to empty the cache after it.

        Args:
            unused_share: returns the unused share of the cache. It is called only if a check is
                due.
        """
        self._left -= 1
        if self._left > 0 or not self._every:
            return False
        unused = unused_share()
        should_empty = unused > 0 and unused >= self._threshold
        if should_empty:
            longest = max(_LONGEST_GAP, self._every)
            self._gap = min(2 * self._gap, longest)
        else:
            self._gap = self._every
        self._left = self._gap
        return should_empty


class MemoryUpkeep(InAttempt):
    """Maintains the memory of an attempt from its start to its end."""

    def __init__(self, live: LiveAttempt, config: RobustConfig) -> None:
        super().__init__(live, config)
        # How many times torch had to empty its cache until the current step, None if unknown.
        self._alloc_retries: int | None = None
        self._tight_steps = 0  # steps in a row in which torch had to empty its cache
        self._has_warned = False
        self._index = device_index(config.device)
        self._fraction = config.memory.fraction
        self._clear_after = config.of(ClearKeys).clear_after
        cache = config.of(CacheKeys)
        self._clears_on_start = cache.clear_on_start
        self._takes_snapshots = config.of(SnapshotKeys).snapshot_on_oom
        self._checks = {
            "step": CacheChecks(cache.empty_cache_frequency, cache.empty_cache_threshold),
            "save": CacheChecks(int("save" in self._clear_after), 0.0),
            "epoch": CacheChecks(int("epoch" in self._clear_after), 0.0),
        }
        self._has_written_oom = False
        self._is_set_up = False
        self._end_history: Callable[[], None] | None = None
        self._steps_with_history = 0
        self._reserve = Reserve()

    def begin(self) -> None:
        """Free memory that earlier work in this process left in the cache, and set the limit."""
        if self._clears_on_start and self._cached().reserved:
            self._clear("start")
        self._set_up_cuda()
        self._reserve.hold()

    def boundary(self, what: str) -> None:
        """Check the cache after a step, if a check is due."""
        if what != "progress":
            return
        self._reserve.hold()
        if not self._is_set_up:
            self._set_up_cuda()
        if self._end_history is not None:
            self._steps_with_history += 1
            if self._steps_with_history == _STEPS_WITH_HISTORY:
                self._end_history()
                self._end_history = None
        self._watch_allocator(self.live.reports.last_step or 0)
        self.pause("step")

    def pause(self, why: str) -> None:
        """Empty the CUDA cache after a step, save or epoch, if that is due and pays off."""
        if self._checks[why].should_empty(lambda: self._cached().unused_share):
            self._clear(why, thorough=False)

    def ran_out(self, error: BaseException, failure: Failure) -> None:
        """Record what fills the memory, only once per attempt because it takes time."""
        self._reserve.release()
        if not self._has_written_oom:
            self._write_oom(failure)

    def end(self, error: BaseException | None) -> None:
        """Record what filled the memory if a lack of memory ended the attempt on this rank."""
        self._reserve.release()
        is_elsewhere = isinstance(error, RankFailure) and error.is_elsewhere
        if isinstance(error, Exception) and not is_elsewhere:
            failure = classify_failure(error)
            if failure.kind.is_memory:
                self.live.reports.record_memory("out of memory")
                self._write_oom(failure)

    def close(self, error: BaseException | None) -> None:
        """Release memory that is no longer in use, and clear the frames of ``error``, which keep
        tensors alive."""
        if error is None:
            self._clear("end")
        elif "failure" in self._clear_after:
            # The next attempt in this process begins with a thorough collection of garbage.
            self._clear("failure", thorough=False, error=error)

    def _watch_allocator(self, step: int) -> None:
        """Warn once if torch had to empty its cache in several steps in a row."""
        before = self._alloc_retries
        total = alloc_retries(self._index)
        self._alloc_retries = total
        has_retried = total is not None and before is not None and total > before
        self._tight_steps = self._tight_steps + 1 if has_retried else 0
        if total is None or self._tight_steps < _TIGHT_STEPS or self._has_warned:
            return
        self._has_warned = True
        log.warning(
            "step %d: GPU memory is nearly full: in two steps in a row torch emptied its cache to "
            "make room, which is slow; robust-train halve-batch takes a smaller micro-batch",
            step,
        )
        self.live.reports.send(MemoryTight(step, total))

    def _set_up_cuda(self) -> None:
        """Set the memory limit and start the history, as soon as the trainer has imported torch."""
        self._is_set_up = limit_when_cuda_starts(self._fraction, self._index)
        has_history = self._index is not None and self._takes_snapshots
        if self._is_set_up and has_history:
            self._end_history = record_history_after_an_oom(self.live.run_dir)

    def _clear(
        self, reason: str, *, thorough: bool = True, error: BaseException | None = None
    ) -> None:
        """Release unused memory, and report how much was released."""
        kind, before = self._in_use()
        started = time.perf_counter()
        if error is None:
            return_memory(thorough=thorough)
        else:
            release_memory(error, thorough=thorough)
        seconds = round(time.perf_counter() - started, 6)
        _, after = self._in_use()
        # Another thread may have allocated memory in the meantime.
        returned = max(before - after, 0)
        step = self.live.reports.last_step
        self.live.reports.send(MemoryCleared(reason, kind, before, after, returned, seconds, step))
        log.debug(
            "memory cleared (%s): %s of %s returned (%s)",
            reason,
            mib(returned, 1),
            mib(before, 1),
            kind,
        )

    def _cached(self) -> Cached:
        """Return the allocator's figures of the GPU on which this process holds the most memory."""
        torch = started_torch()
        if self._index is not None and torch is not None:
            with contextlib.suppress(Exception):
                cached = cached_on(busiest_gpu(torch))
                if cached:
                    return cached
        return Cached()

    def _in_use(self) -> tuple[str, int]:
        """Return ``reserved`` and the size of the CUDA cache, or without a cache ``resident`` and
        the host memory of this process."""
        reserved = self._cached().reserved
        if reserved:
            return "reserved", reserved
        with contextlib.suppress(OSError, psutil.Error):
            return "resident", resident_bytes(psutil.Process())[0]
        return "resident", 0

    def _write_oom(self, failure: Failure) -> None:
        if not self._takes_snapshots:
            return
        self._has_written_oom = True
        live = self.live
        event = write_out_of_memory(
            live.run_dir, failure, attempt=live.attempt, step=live.reports.last_step
        )
        if event is not None:
            live.reports.send(event)


def memory_upkeep(live: LiveAttempt, config: RobustConfig) -> InAttempt:
    """Return the hooks that maintain the memory of an attempt.

    A script gets hooks that do nothing. It trains in a process of its own, and log lines of this
    process would be taken for the end of its output.
    """
    if config.traits.is_program:
        return InAttempt(live, config)
    return MemoryUpkeep(live, config)
