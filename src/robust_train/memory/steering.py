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

from robust_train.config.schema import MemoryConfig
from robust_train.events import MemoryCleared
from robust_train.failures import classify_failure
from robust_train.memory import on_oom
from robust_train.memory.cleanup import release_memory, return_memory
from robust_train.memory.limit import limit_memory
from robust_train.memory.probe import cached_on, device_index, host_memory_of_this_process
from robust_train.memory.sampler import Sampler
from robust_train.run import Run
from robust_train.values import MEMORY_FAILURES, MIB, Failure

log = logging.getLogger("robust_train")

_CAME_BACK = 0.5
_LONGEST_GAP = 100_000
_MOST_OF_THE_TIME = 0.01


@dataclass(frozen=True)
class Periodic:
    """When the cache is looked at next, and what became of the last clearing.

    Attributes:
        gap: steps from one look to the next.
        due: step of the next look; None before the first step.
        after: bytes that stayed reserved at the last clearing, None if it has been judged.
        returned: bytes that it gave back.
    """

    gap: int
    due: int | None = None
    after: int | None = None
    returned: int = 0


def look(
    state: Periodic, frequency: int, threshold: float, step: int, reserved: int, unused_share: float
) -> tuple[bool, Periodic]:
    """Whether to empty the cache after this step, and the state from then on.

    It pays where what is given back stays away. What training takes again in the next steps would
    only have to be asked of the driver anew, which is slow; so where more than half of it has come
    back by the next look, twice as many steps pass until another clearing. Useless ones get rare
    that way: at most 14 in the first 100,000 steps.

    Args:
        state: from the look before.
        frequency: steps between looks where clearing pays, at least 1.
        threshold: share of the reserved memory that must be unused.
        step: the step that is done.
        reserved: bytes that the caching allocator holds.
        unused_share: the part of them that no tensor uses, 0 to 1.
    """
    gap = state.gap
    if state.after is not None:
        has_come_back = reserved - state.after > _CAME_BACK * state.returned
        gap = min(2 * gap, max(_LONGEST_GAP, frequency)) if has_come_back else frequency
    pays = unused_share > 0 and unused_share >= threshold
    return pays, Periodic(gap, step + gap)


def is_affordable(seconds_since_last: float, cost_of_last: float) -> bool:
    """Whether clearing again keeps it below one percent of the time."""
    return seconds_since_last * _MOST_OF_THE_TIME >= cost_of_last


@dataclass(frozen=True)
class Returned:
    """What one clearing gave back: bytes before and after, and the seconds that it took.

    Attributes:
        of: ``reserved`` memory of the GPU, or ``resident`` memory of the host.
    """

    of: str
    before: int
    after: int
    seconds: float

    @property
    def bytes(self) -> int:
        """Given back, never below 0: another thread may have taken some meanwhile."""
        return max(self.before - self.after, 0)

    def as_json(self) -> dict[str, Any]:
        """As the journal and ``summary.json`` have it."""
        return {
            "of": self.of,
            "before_bytes": self.before,
            "after_bytes": self.after,
            "returned_bytes": self.bytes,
            "seconds": round(self.seconds, 6),
        }

    def __str__(self) -> str:
        return (
            f"{self.bytes / MIB:.1f} MiB returned ({self.of}: {self.before / MIB:.1f} → "
            f"{self.after / MIB:.1f} MiB) in {1000 * self.seconds:.0f} ms"
        )


class AttemptMemory:
    """Looks after the memory of one attempt: a context manager around the call of the trainer.

    Clearings at the start and during training concern the CUDA cache; where there is none they
    would cost time and give nothing back, so they are left out.

    Args:
        run: the attempt.
        cfg: its composed config: ``device`` and the keys under ``memory``.
    """

    def __init__(self, run: Run, cfg: Mapping[Any, Any]) -> None:
        self._run = run
        self._device = str(cfg.get("device") or "cpu")
        self._index = device_index(self._device)
        self._settings = settings_of(cfg)
        self._periodic = Periodic(gap=max(self._settings.empty_cache_frequency, 1))
        self._next_log: int | None = None
        self._cost_of_last = 0.0
        self._cleared_at = float("-inf")
        self._has_written_down = False
        self._is_set_up = False
        interval_ms = self._settings.sample_interval_ms
        self._sampler = (
            Sampler(
                run.run_dir,
                run.attempt,
                self._device,
                interval_ms / 1000,
                lambda: run.last_step,
                whole_tree=bool((cfg.get("trainer") or {}).get("argv")),
            )
            if interval_ms
            else None
        )

    def __enter__(self) -> AttemptMemory:
        settings = self._settings
        if settings.clear_on_start and cached_on(self._index) is not None:
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
        self._is_set_up = limit_memory(self._settings.fraction, self._index)
        if self._is_set_up and self._index is not None and self._settings.snapshot_on_oom:
            on_oom.record_history_after_an_oom(self._run.run_dir)

    def step_done(self, step: int) -> None:
        """Look at the cache, and log memory, where it is time to."""
        if not self._is_set_up:
            self._set_up_cuda()
        settings, periodic = self._settings, self._periodic
        if settings.log_frequency:
            if self._next_log is not None and step >= self._next_log:
                self._run.memory_milestone(f"step {step}")
            if self._next_log is None or step >= self._next_log:
                self._next_log = step + settings.log_frequency - step % settings.log_frequency
        if not settings.empty_cache_frequency:
            return
        if periodic.due is None:
            self._periodic = replace(periodic, due=step + periodic.gap)
            return
        if step >= periodic.due:
            self._look(step)

    def checkpoint_saved(self) -> None:
        """Return what copying the weights took."""
        if self._settings.clear_after_save:
            self._clear_cache("save")

    def epoch_ended(self) -> None:
        """Return what validation took and training does not need."""
        if self._settings.clear_after_epoch:
            self._clear_cache("epoch")

    def ran_out(self, error: BaseException) -> None:
        """Write down what filled the memory; once an attempt, for it takes time."""
        if not self._has_written_down:
            self._write_down(classify_failure(error))

    def clean_up(self, error: BaseException | None) -> None:
        """Return all that the attempt does not hold any more, and say how much that was.

        Args:
            error: what ended the trainer; its frames are emptied. None if it returned.
        """
        if error is not None and not self._settings.clear_on_failure:
            return
        if error is None:
            done = self._clear("end", thorough=True)
        else:
            # its process ends, or goes on to a more thorough look for what is left
            done = self._clear("failure", thorough=False, error=error)
        log.info("final clean-up: %s", done)

    def _look(self, step: int) -> None:
        cached = cached_on(self._index)
        if cached is None:
            return
        settings = self._settings
        pays, self._periodic = look(
            self._periodic,
            settings.empty_cache_frequency,
            settings.empty_cache_threshold,
            step,
            cached.reserved,
            cached.unused_share,
        )
        done = self._clear_cache("step") if pays else None
        if done is not None:
            self._periodic = replace(self._periodic, after=done.after, returned=done.bytes)

    def _clear_cache(self, reason: str) -> Returned | None:
        """Empty the CUDA cache, unless the last time is too short ago for what it cost."""
        since = time.monotonic() - self._cleared_at
        if cached_on(self._index) is None or not is_affordable(since, self._cost_of_last):
            return None
        done = self._clear(reason, thorough=False)
        self._cost_of_last, self._cleared_at = done.seconds, time.monotonic()
        return done

    def _clear(
        self, reason: str, *, thorough: bool, error: BaseException | None = None
    ) -> Returned:
        of, before = self._in_use()
        started = time.perf_counter()
        if error is None:
            return_memory(thorough=thorough)
        else:
            release_memory(error, thorough=thorough)
        seconds = time.perf_counter() - started
        done = Returned(of, before, self._in_use()[1], seconds)
        self._run.report(MemoryCleared(reason, step=self._run.last_step, **done.as_json()))
        log.debug("memory cleared (%s): %s", reason, done)
        return done

    def _in_use(self) -> tuple[str, int]:
        cached = cached_on(self._index)
        if cached is not None:
            return "reserved", cached.reserved
        with contextlib.suppress(OSError):
            return "resident", host_memory_of_this_process()[0]
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
    """The keys under ``memory``, with defaults for what a config that was put together by hand
    lacks."""
    given = cfg.get("memory") or {}
    known = {item.name for item in fields(MemoryConfig)}
    return MemoryConfig(**{str(key): given[key] for key in given if str(key) in known})
