"""The memory of an attempt while it runs: the keys under ``memory:``, at work."""

from __future__ import annotations

import contextlib
import logging
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import psutil

from robust_train.attempt.run import Run
from robust_train.config.schema import RobustConfig
from robust_train.failures import classify_failure
from robust_train.host.memory import resident_bytes
from robust_train.memory.cleanup import release_memory, return_memory
from robust_train.memory.cuda import (
    Cached,
    alloc_retries,
    busiest_gpu,
    cached_on,
    device_index,
    started_torch,
)
from robust_train.memory.limits import limit_when_cuda_starts
from robust_train.memory.samples import Sampler
from robust_train.memory.snapshots import (
    record_history_after_an_oom,
    write_out_of_memory,
)
from robust_train.model.errors import RankFailure
from robust_train.model.events import MemoryCleared, MemoryTight
from robust_train.model.failure import Failure
from robust_train.readable import MIB, mib

log = logging.getLogger("robust_train")

_RESERVE_BYTES = 16 * MIB
_LONGEST_GAP = 100_000


class Reserve:
    """A few MiB of address space that are given up when host memory runs out, so that there is room
    to record the failure. Its pages are never touched, so it takes no memory of the machine."""

    def __init__(self) -> None:
        self._pages: mmap.mmap | None = None

    def hold(self) -> None:
        """Take the memory, unless it is held; without room there is none."""
        if self._pages is None:
            with contextlib.suppress(OSError):
                self._pages = mmap.mmap(-1, _RESERVE_BYTES, flags=mmap.MAP_PRIVATE)

    def release(self) -> None:
        """Give the memory up."""
        if self._pages is not None:
            self._pages.close()
            self._pages = None


class CacheChecks:
    """The occasions of one kind (steps, saves, epochs) on which the CUDA cache may be emptied.

    It is emptied if tensors leave at least ``threshold`` of the reserved memory unused. Training
    that takes the memory again has to request it from the driver, which is slow. So the gap to the
    next check doubles each time that the cache is emptied; a check that finds little resets it.
    """

    def __init__(
        self, frequency: int, threshold: float, first: int | None = None
    ) -> None:
        self._frequency = self._gap = frequency
        self._threshold = threshold
        self._due = first

    def is_due(self, number: int) -> bool:
        """Return whether to check on the occasion with this number."""
        if self._due is None:  # the first steps still take what they need
            self._due = number + self._gap
        return number >= self._due

    def check(self, number: int, unused_share: float) -> bool:
        """Return whether to empty the cache, and plan the next check."""
        empties = unused_share > 0 and unused_share >= self._threshold
        longest = max(_LONGEST_GAP, self._frequency)
        self._gap = min(2 * self._gap, longest) if empties else self._frequency
        self._due = number + self._gap
        return empties


@dataclass(frozen=True)
class AllocRetries:
    """Steps in a row in which the allocator had to empty its cache; ``total`` counts how often."""

    total: int | None = None
    steps: int = 0

    @property
    def is_tight(self) -> bool:
        """Whether memory is about to run out."""
        return self.steps >= 2

    def after_step(self, total: int) -> AllocRetries:
        """Return it after another step; retries before the first step do not count."""
        has_retried = self.total is not None and total > self.total
        return AllocRetries(total, self.steps + 1 if has_retried else 0)


class AttemptMemory:
    """Looks after the memory of one attempt: a context manager around the call of the trainer.

    Emptying the cache at the start and during training concerns CUDA only.
    """

    def __init__(
        self,
        run: Run,
        config: RobustConfig,  # of the attempt
        read_alloc_retries: Callable[[], int | None] = alloc_retries,
    ) -> None:
        self._run = run
        self._read_alloc_retries = read_alloc_retries
        self._alloc_retries = AllocRetries()
        self._has_warned = False
        self._shrinks = config.shrink_before_oom
        self._index = device_index(config.device)
        self._settings = memory = config.memory
        self._checks = {
            "step": CacheChecks(
                max(memory.empty_cache_frequency, 1), memory.empty_cache_threshold
            ),
            "save": CacheChecks(1, 0.0, first=1),
            "epoch": CacheChecks(1, 0.0, first=1),
        }
        self._occasions = {"save": 0, "epoch": 0}
        self._next_log: int | None = None
        self._has_written_oom = False
        self._is_set_up = False
        self._reserve = Reserve()
        self._sampler: Sampler | None = None
        if memory.sample_interval_ms:
            self._sampler = Sampler(
                run.run_dir,
                run.attempt,
                config.device,
                memory.sample_interval_ms / 1000,
                lambda: run.last_step,
                whole_tree=config.is_script,
            )

    def __enter__(self) -> AttemptMemory:
        if self._settings.clear_on_start and self._cached() is not None:
            self._clear("start", thorough=True)
        self._set_up_cuda()
        self._reserve.hold()
        if self._sampler is not None:
            self._sampler.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        self._reserve.release()
        try:
            # another rank records itself what it has run out of
            is_elsewhere = isinstance(error, RankFailure) and error.is_elsewhere
            if isinstance(error, Exception) and not is_elsewhere:
                failure = classify_failure(error)
                if failure.kind.is_memory:
                    self._run.record_memory("out of memory")
                    self._write_oom(error, failure)
        finally:
            if self._sampler is not None:
                self._sampler.stop()

    def step_done(self, step: int) -> None:
        """Check the cache, and log memory, when it is time to."""
        self._reserve.hold()
        if not self._is_set_up:
            self._set_up_cuda()
        self._watch_allocator(step)
        every = self._settings.log_frequency
        if every:
            if self._next_log is not None and step >= self._next_log:
                self._run.memory_milestone(f"step {step}")
            if self._next_log is None or step >= self._next_log:
                self._next_log = step + every - step % every
        if self._settings.empty_cache_frequency:
            self._check_cache("step", step)

    def checkpoint_saved(self) -> None:
        """Empty the cache after a save, unless training takes the same memory again each time."""
        if self._settings.clear_after_save:
            self._occasion("save")

    def epoch_ended(self) -> None:
        """Empty the cache of what validation took and training does not need."""
        if self._settings.clear_after_epoch:
            self._occasion("epoch")

    def ran_out(self, error: BaseException, failure: Failure) -> None:
        """Record what filled the memory; once an attempt, because it takes time."""
        self._reserve.release()
        if not self._has_written_oom:
            self._write_oom(error, failure)

    def clean_up(self, error: BaseException | None) -> None:
        """Return memory that is not in use any more; the frames of ``error`` are emptied."""
        if error is not None and not self._settings.clear_on_failure:
            return
        if error is None:
            self._clear("end", thorough=True)
        else:  # a thorough check of what is left follows
            self._clear("failure", thorough=False, error=error)

    def _watch_allocator(self, step: int) -> None:
        """Warn, once, if steps in a row had to empty the cache; shrink if that is configured."""
        total = self._read_alloc_retries()
        if total is None:
            return
        self._alloc_retries = self._alloc_retries.after_step(total)
        if not self._alloc_retries.is_tight:
            return
        if not self._has_warned:
            self._has_warned = True
            why = "in two steps in a row torch emptied its cache to find room, which is slow"
            hint = (
                ""
                if self._shrinks
                else "; shrink_before_oom=true takes a smaller micro-batch"
            )
            log.warning("step %d: GPU memory is nearly out: %s%s", step, why, hint)
            self._run.report(MemoryTight(step, total))
        if self._shrinks and self._run.splits_batches:
            self._run.micro_batcher.shrink("memory is nearly out (shrink_before_oom)")
            self._alloc_retries = AllocRetries(total)

    def _set_up_cuda(self) -> None:
        """Set the limit as soon as torch is there, which may start CUDA later."""
        self._is_set_up = limit_when_cuda_starts(self._settings.fraction, self._index)
        if (
            self._is_set_up
            and self._index is not None
            and self._settings.snapshot_on_oom
        ):
            record_history_after_an_oom(self._run.run_dir)

    def _occasion(self, reason: str) -> None:
        self._occasions[reason] += 1
        self._check_cache(reason, self._occasions[reason])

    def _check_cache(self, reason: str, number: int) -> None:
        """Empty the CUDA cache if that is due and pays."""
        checks = self._checks[reason]
        cached = self._cached() if checks.is_due(number) else None
        if cached is not None and checks.check(number, cached.unused_share):
            self._clear(reason, thorough=False)

    def _clear(
        self, reason: str, *, thorough: bool, error: BaseException | None = None
    ) -> None:
        of, before = self._in_use()
        started = time.perf_counter()
        if error is None:
            return_memory(thorough=thorough)
        else:
            release_memory(error, thorough=thorough)
        seconds = round(time.perf_counter() - started, 6)
        after = self._in_use()[1]
        # another thread may have allocated meanwhile
        returned = max(before - after, 0)
        step = self._run.last_step
        done = MemoryCleared(reason, of, before, after, returned, seconds, step)
        self._run.report(done)
        log.debug("memory cleared (%s): %s", reason, _describe(done))

    def _cached(self) -> Cached | None:
        """Return the allocator's figures of the GPU on which this process holds most."""
        torch = started_torch()
        if self._index is None or torch is None:
            return None
        with contextlib.suppress(Exception):
            return cached_on(busiest_gpu(torch))
        return None

    def _in_use(self) -> tuple[str, int]:
        cached = self._cached()
        if cached is not None:
            return "reserved", cached.reserved
        with contextlib.suppress(OSError, psutil.Error):
            return "resident", resident_bytes()[0]
        return "resident", 0

    def _write_oom(self, error: BaseException, failure: Failure) -> None:
        if not self._settings.snapshot_on_oom:
            return
        self._has_written_oom = True
        run = self._run
        event = write_out_of_memory(
            run.run_dir, error, failure, attempt=run.attempt, step=run.last_step
        )
        if event is not None:
            run.report(event)


def _describe(done: MemoryCleared) -> str:
    before, after = done.before_bytes / MIB, mib(done.after_bytes, 1)
    return (
        f"{mib(done.returned_bytes, 1)} returned ({done.of}: {before:.1f} → {after}) "
        f"in {1000 * done.seconds:.0f} ms"
    )
