"""Looks for signs of life of an attempt: its events and output, CPU time, GPUs.

As long as progress is reported, nothing is looked at.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import psutil

from robust_train.config.request import AttemptRequest
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.nvml_session import close_session
from robust_train.launcher.stall import (
    SHORTEST_SECONDS,
    WARNING_SHARE,
    Pulse,
    Standstill,
    standstill,
    worth_keeping,
)
from robust_train.model.events import (
    CheckpointSaved,
    EpochEnded,
    Event,
    MicroBatchChanged,
    PauseLearned,
    Progress,
    StallWarning,
    TrainingStarted,
    UserEvent,
)
from robust_train.readable import duration

log = logging.getLogger("robust_train")

_OF_THE_LOOP = (Progress, EpochEnded, CheckpointSaved, MicroBatchChanged, UserEvent)
"""Once progress was reported, each of these is progress; others may come from a thread."""

_LONGEST_TICK_SECONDS = 1.0, 5.0
"""Between two ticks, by the limit; if it was longer, the launcher was suspended or the machine
slept."""
_LOOK_SECONDS = 5.0
_LOOKS_FROM_SHARE = 0.05
_CPU_SHARE, _CPU_GRAIN_SECONDS = 0.02, 0.02
_BYTES_PER_SECOND = 200_000
_GPU_SECONDS = 30.0
_GPU_PERCENT = 5
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True)
class _Glance:
    """The trainer's processes at a moment."""

    at: float
    cpu_seconds: float
    moved_bytes: int  # read and written: a download or a copy needs little CPU time
    pids: frozenset[int]
    stopped: int  # of these, how many are stopped

    def is_busier_than(self, before: _Glance) -> bool:
        least = _CPU_GRAIN_SECONDS + _CPU_SHARE * (self.at - before.at)
        return (
            self.pids != before.pids or self.cpu_seconds - before.cpu_seconds >= least
        )

    def moves_data_since(self, before: _Glance) -> bool:
        return self.moved_bytes - before.moved_bytes >= _BYTES_PER_SECOND * (
            self.at - before.at
        )


class StallWatch:
    """Watches one attempt, whose interpreters have these process ids."""

    def __init__(
        self,
        request: AttemptRequest,
        pids: Sequence[int],
        on_event: Callable[[Event], None],
    ) -> None:
        self._request, self._pids, self._on_event = request, pids, on_event
        self._pulse = Pulse(longest=request.longest_pause)
        self._known = request.longest_pause
        self._ticked = time.monotonic()
        limit = request.config.stall_timeout_seconds or SHORTEST_SECONDS
        self._longest_tick = min(
            max(limit / 10, _LONGEST_TICK_SECONDS[0]), _LONGEST_TICK_SECONDS[1]
        )
        self._next_look = self._next_gpu = 0.0
        self._glance: _Glance | None = None
        self._is_suspended = self._has_warned = self._moves_data = False

    def on_event(self, event: Event) -> None:
        """Record an event of the attempt."""
        self._let_time_pass()
        pulse = self._pulse
        has_begun = pulse.reported is not None
        if isinstance(event, Progress) or (
            has_begun and isinstance(event, _OF_THE_LOOP)
        ):
            pulse = pulse.after_progress()
        elif isinstance(event, TrainingStarted) and not has_begun:
            pulse = replace(pulse, begun=pulse.now)
        self._pulse = replace(pulse, alive=pulse.now)
        self._is_suspended = False
        if worth_keeping(pulse.longest, self._known):
            self._known = pulse.longest
            self._on_event(PauseLearned(round(pulse.longest, 1)))

    def on_output(self) -> None:
        """Record that the attempt has printed something."""
        self._let_time_pass()
        if self._glance is None or not self._glance.stopped:
            self._pulse = replace(self._pulse, alive=self._pulse.now)

    def poll(self) -> Standstill | None:
        """Return the standstill once the attempt hangs; warn when half of its limit is over."""
        self._let_time_pass()
        found = standstill(self._request.config.stall_timeout_seconds, self._pulse)
        if found is None or self._ticked < self._next_look:
            return None
        if found.share >= _LOOKS_FROM_SHARE:
            self._look(found.limit_seconds)
            found = standstill(self._request.config.stall_timeout_seconds, self._pulse)
            assert found is not None
        self._warn(found)
        return found if found.share >= 1 and not self._is_suspended else None

    def _let_time_pass(self) -> None:
        now = time.monotonic()
        if not self._is_suspended:
            passed = min(now - self._ticked, self._longest_tick)
            self._pulse = replace(self._pulse, now=self._pulse.now + passed)
        self._ticked = now

    def _look(self, limit_seconds: float) -> None:
        every = min(limit_seconds / 20, max(_LOOK_SECONDS, limit_seconds / 100))
        self._next_look = self._ticked + every
        before, now = self._glance, self._take_glance()
        self._glance = now
        was_suspended, self._is_suspended = (
            self._is_suspended,
            0 < len(now.pids) == now.stopped,
        )
        if self._is_suspended:
            if not was_suspended:
                log.info(
                    "the attempt is stopped by a signal: this time does not count as a stall"
                )
            return
        is_recent = before is not None and now.at - before.at <= 4 * max(every, 1.0)
        if now.stopped or before is None or not is_recent:
            return
        # at two looks in a row: once in a while a record of what is measured is rewritten
        did_move, self._moves_data = self._moves_data, now.moves_data_since(before)
        moves = did_move and self._moves_data
        if moves or now.is_busier_than(before) or self._gpu_is_busy():
            self._pulse = replace(self._pulse, alive=self._pulse.now)

    def _take_glance(self) -> _Glance:
        cpu_seconds, moved_bytes, stopped, pids = 0.0, 0, 0, set()
        for process in trainers_processes(self._pids, self._request):
            with contextlib.suppress(psutil.Error), process.oneshot():
                status = process.status()
                if status == psutil.STATUS_ZOMBIE:
                    continue
                # with those of children that were collected: a shell starts many short ones
                cpu_seconds += sum(process.cpu_times()[:4])
                stopped += status in STOPPED
                pids.add(process.pid)
                moved_bytes += bytes_moved_by(process)
        return _Glance(
            time.monotonic(), cpu_seconds, moved_bytes, frozenset(pids), stopped
        )

    def _gpu_is_busy(self) -> bool:
        uuids = tuple(gpu.uuid for gpu in self._request.spec.gpus)
        if not uuids or self._ticked < self._next_gpu:
            return False
        self._next_gpu = self._ticked + _GPU_SECONDS
        found = read_inventory(processes=False).gpus
        close_session()  # an open one blocks a reset of any GPU
        return any(
            gpu.uuid in uuids and (gpu.utilization_percent or 0) >= _GPU_PERCENT
            for gpu in found
        )

    def _warn(self, found: Standstill) -> None:
        if found.share < WARNING_SHARE:
            if self._has_warned:
                log.info("the attempt goes on")
            self._has_warned = False
        elif not self._has_warned and not self._is_suspended and found.share < 1:
            self._has_warned = True
            log.warning(
                "%s: after %s (stall_timeout_minutes) the attempt is ended, and another one goes "
                "on from its last checkpoint",
                found.what,
                duration(found.limit_seconds),
            )
            seconds = round(found.seconds, 1), round(found.limit_seconds, 1)
            self._on_event(StallWarning(*seconds))


def bytes_moved_by(process: psutil.Process) -> int:
    """Return what a process has read and written; 0 where the kernel does not count that."""
    with contextlib.suppress(psutil.Error, AttributeError, RuntimeError, ValueError):
        figures = process.io_counters()
        return figures.read_chars + figures.write_chars
    return 0


def trainers_processes(
    pids: Sequence[int], request: AttemptRequest
) -> list[psutil.Process]:
    """Return the processes that train: of a script without the one that only supervises it.

    What has lost its parent is a child of the reaper, the parent of the interpreters.
    """
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            one = psutil.Process(pid)
            found += ([] if request.runs_script else [one]) + one.children(
                recursive=True
            )
    return found
