"""What an attempt does about its memory while it runs: the keys under ``memory:``, at work."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from types import TracebackType

import psutil

from robust_train.config.attempt import AttemptSettings
from robust_train.events import MemoryCleared, MemoryTight
from robust_train.failures import classify_failure
from robust_train.memory.cleanup import release_memory, return_memory
from robust_train.memory.cuda import (
    Cached,
    alloc_retries,
    busiest_gpu,
    cached_on,
    device_index,
    started_torch,
)
from robust_train.memory.host import resident_bytes
from robust_train.memory.limits import limit_when_cuda_starts
from robust_train.memory.pacing import AllocRetries, BackOff, Cost
from robust_train.memory.sampler import Sampler
from robust_train.memory.snapshots import record_history_after_an_oom, write_out_of_memory
from robust_train.readable import mib
from robust_train.run import Run
from robust_train.values import MIB, Failure

log = logging.getLogger("robust_train")


class AttemptMemory:
    """Looks after the memory of one attempt: a context manager around the call of the trainer.

    Clearings at the start and during training concern the CUDA cache, and are left out without one.
    """

    def __init__(
        self,
        run: Run,
        settings: AttemptSettings,
        read_alloc_retries: Callable[[], int | None] = alloc_retries,
    ) -> None:
        self._run = run
        self._read_alloc_retries = read_alloc_retries
        self._alloc_retries = AllocRetries()
        self._has_warned = False
        self._shrinks = settings.shrink_before_oom
        self._index = device_index(settings.device)
        self._settings = memory = settings.memory
        self._back_off = {
            "step": BackOff(
                max(memory.empty_cache_frequency, 1),
                memory.empty_cache_threshold,
                # the first steps are still taking what they need
                skips_first=True,
            ),
            "save": BackOff(),
            "epoch": BackOff(),
        }
        self._occasions = {"save": 0, "epoch": 0}
        self._cost = Cost()
        self._next_log: int | None = None
        self._has_written_oom = False
        self._is_set_up = False
        self._sampler: Sampler | None = None
        if memory.sample_interval_ms:
            self._sampler = Sampler(
                run.run_dir,
                run.attempt,
                settings.device,
                memory.sample_interval_ms / 1000,
                lambda: run.last_step,
                whole_tree=settings.is_script,
            )

    def __enter__(self) -> AttemptMemory:
        if self._settings.clear_on_start and self._cached() is not None:
            self._clear("start", thorough=True)
        self._set_up_cuda()
        if self._sampler is not None:
            self._sampler.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        try:
            # another rank writes what it has run out of itself
            if isinstance(error, Exception) and not hasattr(error, "heard_of_rank"):
                failure = classify_failure(error)
                if failure.kind.is_memory:
                    self._run.record_memory("out of memory")
                    self._write_oom(failure)
        finally:
            if self._sampler is not None:
                self._sampler.stop()

    def step_done(self, step: int) -> None:
        """Check the cache, and log memory, where it is time to."""
        self._cost.step_done(time.monotonic())
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

    def ran_out(self, error: BaseException) -> None:
        """Write down what filled the memory; once an attempt, for it takes time."""
        if not self._has_written_oom:
            self._write_oom(classify_failure(error))

    def clean_up(self, error: BaseException | None) -> None:
        """Return all that the attempt holds no more; the frames of ``error`` are emptied."""
        if error is not None and not self._settings.clear_on_failure:
            return
        if error is None:
            self._clear("end", thorough=True)
        else:  # a more thorough look for what is left follows
            self._clear("failure", thorough=False, error=error)

    def _watch_allocator(self, step: int) -> None:
        """Warn, once, where steps in a row had to empty the cache; shrink where that is wanted."""
        total = self._read_alloc_retries()
        if total is None:
            return
        self._alloc_retries = self._alloc_retries.after_step(total)
        if not self._alloc_retries.is_tight:
            return
        if not self._has_warned:
            self._has_warned = True
            why = "in two steps in a row torch emptied its cache to find room, which is slow"
            hint = "" if self._shrinks else "; shrink_before_oom=true takes a smaller micro-batch"
            log.warning("step %d: GPU memory is nearly out: %s%s", step, why, hint)
            self._run.report(MemoryTight(step, total))
        if self._shrinks and self._run.splits_batches:
            self._run.micro_batcher.shrink("memory is nearly out (shrink_before_oom)")
            self._alloc_retries = AllocRetries(total)

    def _set_up_cuda(self) -> None:
        """Set the limit as soon as torch is there, which may start CUDA later."""
        self._is_set_up = limit_when_cuda_starts(self._settings.fraction, self._index)
        if self._is_set_up and self._index is not None and self._settings.snapshot_on_oom:
            record_history_after_an_oom(self._run.run_dir)

    def _occasion(self, reason: str) -> None:
        self._occasions[reason] += 1
        self._check_cache(reason, self._occasions[reason])

    def _check_cache(self, reason: str, number: int) -> None:
        """Empty the CUDA cache where that is due, pays, and is not too soon for what it costs."""
        back_off = self._back_off[reason]
        cached = self._cached() if back_off.is_due(number) else None
        if cached is None:
            return
        pays = back_off.check(number, cached.reserved, cached.unused_share)
        if pays and self._cost.is_affordable(time.monotonic()):
            done = self._clear(reason, thorough=False)
            self._cost.clearing_done(done.seconds, time.monotonic())
            back_off.cleared(done.after_bytes, done.returned_bytes)

    def _clear(
        self, reason: str, *, thorough: bool, error: BaseException | None = None
    ) -> MemoryCleared:
        of, before = self._in_use()
        started = time.perf_counter()
        if error is None:
            return_memory(thorough=thorough)
        else:
            release_memory(error, thorough=thorough)
        seconds = round(time.perf_counter() - started, 6)
        after = self._in_use()[1]
        # another thread may have taken some meanwhile
        returned = max(before - after, 0)
        step = self._run.last_step
        done = MemoryCleared(reason, of, before, after, returned, seconds, step)
        self._run.report(done)
        log.debug("memory cleared (%s): %s", reason, _describe(done))
        return done

    def _cached(self) -> Cached | None:
        """Return the allocator's figures where this process holds most."""
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

    def _write_oom(self, failure: Failure) -> None:
        if not self._settings.snapshot_on_oom:
            return
        self._has_written_oom = True
        run = self._run
        event = write_out_of_memory(
            run.run_dir, attempt=run.attempt, step=run.last_step, failure=failure
        )
        if event is not None:
            run.report(event)


def _describe(done: MemoryCleared) -> str:
    before, after = done.before_bytes / MIB, mib(done.after_bytes, 1)
    return (
        f"{mib(done.returned_bytes, 1)} returned ({done.of}: {before:.1f} → {after}) "
        f"in {1000 * done.seconds:.0f} ms"
    )
