"""Applies the keys under ``memory:`` to a running attempt, in the process that trains."""

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
_LONGEST_GAP = 100_000
_TIGHT_STEPS = 2
_STEPS_WITH_HISTORY = 300


class Reserve:
    """A few MiB of address space that are released when host memory runs out, so that there is room
    to record the failure. Its pages are never touched, so it uses no memory of the machine."""

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
    """The occasions of a kind (steps, saves, epochs) on which the CUDA cache may be emptied.

    It is emptied if tensors leave at least ``threshold`` of the reserved memory unused. Training
    that takes the memory again has to request it from the driver, which is slow. So the gap to the
    next check doubles each time that the cache is emptied. A check that finds little resets it.
    """

    def __init__(
        self,
        every: int,  # 0 for never
        threshold: float,
    ) -> None:
        self._every = every
        self._threshold = threshold
        self._gap = self._left = every

    def empties(self, unused_share: Callable[[], float]) -> bool:
        """Return whether to empty the cache on this occasion. Only a check calls the function."""
        self._left -= 1
        if self._left > 0 or not self._every:
            return False
        unused = unused_share()
        empties = unused > 0 and unused >= self._threshold
        longest = max(_LONGEST_GAP, self._every)
        self._left = self._gap = min(2 * self._gap, longest) if empties else self._every
        return empties


class MemoryUpkeep(InAttempt):
    """Empties the CUDA cache of an attempt, and returns its memory at the end.

    Emptying the cache at the start and during training concerns CUDA only.
    """

    def __init__(self, live: LiveAttempt, config: RobustConfig) -> None:
        super().__init__(live, config)
        self._alloc_retries: int | None = None  # before the current step
        self._tight_steps = 0  # steps in a row that had to empty the cache
        self._has_warned = False
        self._index = device_index(config.device)
        self._fraction = config.memory.fraction
        self._clear_after = config.of(ClearKeys).clear_after
        self._cache = cache = config.of(CacheKeys)
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
        """Free memory of earlier work, and set the limit."""
        if self._cache.clear_on_start and self._cached().reserved:
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
        if self._checks[why].empties(lambda: self._cached().unused_share):
            self._clear(why, thorough=False)

    def ran_out(self, error: BaseException, failure: Failure) -> None:
        """Record the largest users of memory, once per attempt because it takes time."""
        self._reserve.release()
        if not self._has_written_oom:
            self._write_oom(failure)

    def end(self, error: BaseException | None) -> None:
        """Record what filled the memory, if that ended the attempt.

        Another rank records its own lack of memory.
        """
        self._reserve.release()
        is_elsewhere = isinstance(error, RankFailure) and error.is_elsewhere
        if isinstance(error, Exception) and not is_elsewhere:
            failure = classify_failure(error)
            if failure.kind.is_memory:
                self.live.reports.record_memory("out of memory")
                self._write_oom(failure)

    def close(self, error: BaseException | None) -> None:
        """Return memory that is no longer in use, and empty the frames of ``error``."""
        if error is None:
            self._clear("end")
        elif "failure" in self._clear_after:
            # A thorough check of the rest follows.
            self._clear("failure", thorough=False, error=error)

    def _watch_allocator(self, step: int) -> None:
        """Warn, once, if steps in a row had to empty the cache."""
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
        """Set the limit as soon as torch is there, which may start CUDA later."""
        self._is_set_up = limit_when_cuda_starts(self._fraction, self._index)
        has_history = self._index is not None and self._takes_snapshots
        if self._is_set_up and has_history:
            self._end_history = record_history_after_an_oom(self.live.run_dir)

    def _clear(
        self, reason: str, *, thorough: bool = True, error: BaseException | None = None
    ) -> None:
        of, before = self._in_use()
        started = time.perf_counter()
        if error is None:
            return_memory(thorough=thorough)
        else:
            release_memory(error, thorough=thorough)
        seconds = round(time.perf_counter() - started, 6)
        after = self._in_use()[1]
        # Another thread may have allocated in the meantime.
        returned = max(before - after, 0)
        step = self.live.reports.last_step
        self.live.reports.send(MemoryCleared(reason, of, before, after, returned, seconds, step))
        log.debug(
            "memory cleared (%s): %s of %s returned (%s)",
            reason,
            mib(returned, 1),
            mib(before, 1),
            of,
        )

    def _cached(self) -> Cached:
        """Return the allocator's figures of the GPU on which this process holds most."""
        torch = started_torch()
        if self._index is not None and torch is not None:
            with contextlib.suppress(Exception):
                cached = cached_on(busiest_gpu(torch))
                if cached:
                    return cached
        return Cached()

    def _in_use(self) -> tuple[str, int]:
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
    """Return the hook that maintains the memory of an attempt.

    A program is left alone: it has its own process, and log lines from here would be read as the
    end of its output.
    """
    if config.traits.is_program:
        return InAttempt(live, config)
    return MemoryUpkeep(live, config)
