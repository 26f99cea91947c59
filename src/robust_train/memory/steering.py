"""What an attempt does about its memory while it runs: the keys under ``memory:``, at work.

The decisions are pure functions further up; :class:`AttemptMemory` carries them out.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import Any

import psutil

from robust_train.config.schema import MemoryConfig
from robust_train.events import MemoryCleared
from robust_train.failures import classify_failure
from robust_train.memory import on_oom
from robust_train.memory.cleanup import release_memory, return_memory
from robust_train.memory.holders import started_torch
from robust_train.memory.host import resident_bytes
from robust_train.memory.sampler import Sampler
from robust_train.memory.segments import Cached, busiest_gpu, cached_on, device_index
from robust_train.memory.settings import limit_when_cuda_starts
from robust_train.run import Run
from robust_train.values import MEMORY_FAILURES, MIB, Failure

log = logging.getLogger("robust_train")

_CAME_BACK = 0.5
_LONGEST_GAP = 100_000
_MOST_OF_THE_TIME = 0.01


@dataclass(frozen=True)
class BackOff:
    """When the cache is checked next on one kind of occasion, and what the last clearing did.

    Attributes:
        gap: occasions (steps, saves, epochs) from one check to the next.
        due: number of the next one to check at; None before the first.
        after: bytes that stayed reserved at the last clearing, None once that was assessed.
        returned: bytes that it returned.
    """

    gap: int = 1
    due: int | None = None
    after: int | None = None
    returned: int = 0


def should_clear(
    state: BackOff,
    number: int,
    reserved: int,
    unused_share: float,
    *,
    frequency: int = 1,
    threshold: float = 0.0,
) -> tuple[bool, BackOff]:
    """Decide whether to empty the cache on this occasion; return that and the state from then on.

    It pays where what is returned stays away. What training takes again would only have to be
    asked of the driver anew, which is slow; so where more than half of it has come back by the
    next check, twice as many occasions pass until another clearing: at most 18 useless ones in
    100,000 steps.

    Args:
        state: from the check before.
        number: of the occasion.
        reserved: bytes that the caching allocator holds.
        unused_share: the part of them that no tensor uses, 0 to 1.
        frequency: occasions between checks where clearing pays, at least 1.
        threshold: share of the reserved memory that must be unused.
    """
    gap = state.gap
    if state.after is not None:
        has_come_back = reserved - state.after > _CAME_BACK * state.returned
        gap = min(2 * gap, max(_LONGEST_GAP, frequency)) if has_come_back else frequency
    pays = unused_share > 0 and unused_share >= threshold
    return pays, BackOff(gap, number + gap)


@dataclass(frozen=True)
class Cost:
    """What clearing costs in time, in seconds: its own, and taking the memory again.

    Attributes:
        last: of the last clearing, with what the step after it took longer than usual.
        ended: when that clearing had ended, of the monotonic clock.
        usual_step: of a step that no clearing went before; None before the first.
        step_began: when the running step began; None before the first.
        was_cleared: since the last step.
    """

    last: float = 0.0
    ended: float = float("-inf")
    usual_step: float | None = None
    step_began: float | None = None
    was_cleared: bool = False

    def is_affordable(self, now: float) -> bool:
        """Whether clearing again keeps it below one percent of the time."""
        return (now - self.ended) * _MOST_OF_THE_TIME >= self.last

    def after_clearing(self, seconds: float, now: float) -> Cost:
        """Return it after a clearing that took ``seconds``; the next step begins now."""
        return replace(self, last=seconds, ended=now, step_began=now, was_cleared=True)

    def after_step(self, now: float) -> Cost:
        """Return it after a step, whose end is now.

        ``cudaMalloc`` waits for the GPU, so memory that the step had to take again shows in it.
        """
        if self.step_began is None:
            return replace(self, step_began=now)
        seconds = now - self.step_began
        if not self.was_cleared:
            return replace(self, usual_step=seconds, step_began=now)
        longer = 0.0 if self.usual_step is None else max(seconds - self.usual_step, 0.0)
        return replace(self, last=self.last + longer, step_began=now, was_cleared=False)


def describe(done: MemoryCleared) -> str:
    """Return what one clearing did as a line for people."""
    before, after = done.before_bytes / MIB, done.after_bytes / MIB
    return (
        f"{done.returned_bytes / MIB:.1f} MiB returned ({done.of}: {before:.1f} → {after:.1f} MiB) "
        f"in {1000 * done.seconds:.0f} ms"
    )


class AttemptMemory:
    """Looks after the memory of one attempt: a context manager around the call of the trainer.

    Clearings at the start and during training concern the CUDA cache, and are left out without one.
    ``cfg`` is the attempt's config: ``device`` and the keys under ``memory``.
    """

    def __init__(self, run: Run, cfg: Mapping[Any, Any]) -> None:
        self._run = run
        device = str(cfg.get("device") or "cpu")
        self._index = device_index(device)
        self._settings = settings_of(cfg)
        self._back_off = {
            "step": BackOff(gap=max(self._settings.empty_cache_frequency, 1)),
            "save": BackOff(),
            "epoch": BackOff(),
        }
        self._occasions = {"save": 0, "epoch": 0}
        self._cost = Cost()
        self._next_log: int | None = None
        self._has_written_down = False
        self._is_set_up = False
        interval_ms = self._settings.sample_interval_ms
        self._sampler = (
            Sampler(
                run.run_dir,
                run.attempt,
                device,
                interval_ms / 1000,
                lambda: run.last_step,
                whole_tree=bool((cfg.get("trainer") or {}).get("argv")),
            )
            if interval_ms
            else None
        )

    def __enter__(self) -> AttemptMemory:
        settings = self._settings
        if settings.clear_on_start and self._cached() is not None:
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
            # what another rank has run out of is written down over there
            if isinstance(error, Exception) and not hasattr(error, "heard_of_rank"):
                failure = classify_failure(error)
                if failure.kind in MEMORY_FAILURES:
                    self._write_down(failure)
        finally:
            if self._sampler is not None:
                self._sampler.stop()

    def _set_up_cuda(self) -> None:
        """As soon as torch is there, which may start CUDA later."""
        self._is_set_up = limit_when_cuda_starts(self._settings.fraction, self._index)
        if self._is_set_up and self._index is not None and self._settings.snapshot_on_oom:
            on_oom.record_history_after_an_oom(self._run.run_dir)

    def step_done(self, step: int) -> None:
        """Check the cache, and log memory, where it is time to."""
        self._cost = self._cost.after_step(time.monotonic())
        if not self._is_set_up:
            self._set_up_cuda()
        every = self._settings.log_frequency
        if every:
            if self._next_log is not None and step >= self._next_log:
                self._run.memory_milestone(f"step {step}")
            if self._next_log is None or step >= self._next_log:
                self._next_log = step + every - step % every
        if self._settings.empty_cache_frequency:
            self._check_cache(
                "step",
                step,
                frequency=self._settings.empty_cache_frequency,
                threshold=self._settings.empty_cache_threshold,
            )

    def checkpoint_saved(self) -> None:
        """Return what copying the weights took, unless training takes it again each time."""
        if self._settings.clear_after_save:
            self._occasion("save")

    def epoch_ended(self) -> None:
        """Return what validation took and training does not need."""
        if self._settings.clear_after_epoch:
            self._occasion("epoch")

    def ran_out(self, error: BaseException) -> None:
        """Write down what filled the memory; once an attempt, for it takes time."""
        if not self._has_written_down:
            self._write_down(classify_failure(error))

    def clean_up(self, error: BaseException | None) -> None:
        """Return all that the attempt holds no more; the frames of ``error`` are emptied."""
        if error is not None and not self._settings.clear_on_failure:
            return
        if error is None:
            done = self._clear("end", thorough=True)
        else:
            # a more thorough look for what is left follows
            done = self._clear("failure", thorough=False, error=error)
        log.info("final clean-up: %s", describe(done))

    def _occasion(self, reason: str) -> None:
        self._occasions[reason] += 1
        self._check_cache(reason, self._occasions[reason])

    def _check_cache(
        self, reason: str, number: int, *, frequency: int = 1, threshold: float = 0.0
    ) -> None:
        """Empty the CUDA cache where that is due, pays, and is not too soon for what it costs."""
        state = self._back_off[reason]
        if state.due is None and reason == "step":
            # the first steps are still taking what they need
            self._back_off[reason] = replace(state, due=number + state.gap)
            return
        if state.due is not None and number < state.due:
            return
        cached = self._cached()
        if cached is None:
            return
        pays, state = should_clear(
            state,
            number,
            cached.reserved,
            cached.unused_share,
            frequency=frequency,
            threshold=threshold,
        )
        if pays and self._cost.is_affordable(time.monotonic()):
            done = self._clear(reason, thorough=False)
            self._cost = self._cost.after_clearing(done.seconds, time.monotonic())
            state = replace(state, after=done.after_bytes, returned=done.returned_bytes)
        self._back_off[reason] = state

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
        log.debug("memory cleared (%s): %s", reason, describe(done))
        return done

    def _cached(self) -> Cached | None:
        """The allocator's figures where this process holds most, be it the current GPU or not."""
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

    def _write_down(self, failure: Failure) -> None:
        if not self._settings.snapshot_on_oom:
            return
        self._has_written_down = True
        run = self._run
        event = on_oom.write_down(
            run.run_dir, attempt=run.attempt, step=run.last_step, failure=failure
        )
        if event is not None:
            run.report(event)


def settings_of(cfg: Mapping[Any, Any]) -> MemoryConfig:
    """Return the keys under ``memory``, with defaults for what a hand-made config lacks."""
    given = cfg.get("memory") or {}
    known = {item.name for item in fields(MemoryConfig)}
    return MemoryConfig(**{str(key): given[key] for key in given if str(key) in known})
