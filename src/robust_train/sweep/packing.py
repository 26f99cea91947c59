"""Decides how many jobs of a sweep share its GPUs (``gpu_jobs_per_device=auto``).

:class:`.gpu_queue.GpuQueue` calls `Packer` in the sweep's process. `Packer` reads the host's queue
and the jobs' run folders into a `Look`, and `Packing` decides. The decision is pure.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from robust_train.config.schema import RobustConfig
from robust_train.folder.state import RunState, read_state
from robust_train.queue.queue_dir import QueueError, directory_for
from robust_train.queue.registry import QueuedJob, Registry

log = logging.getLogger("robust_train")

_GAIN = 0.25
"""Added jobs must bring at least this share of a proportional speed-up, or no more are added."""

_LOOK_SECONDS = 1.0
_STAGE_SECONDS = 10.0  # how long the speed of a number of jobs is measured
_BATCH = re.compile(r"\+*(?:robust\.)?training\.batch_size=(\d+)")


@dataclass(frozen=True)
class Look:
    """A snapshot of a sweep's jobs."""

    on_gpus: int  # jobs that have their GPUs
    waiting: int = 0  # jobs that have started and wait for a GPU
    measured: int = 0  # jobs on GPUs whose memory is measured, so that they accept others
    room: int = 0  # further jobs that fit beside them by memory
    # Samples per second over all jobs. None until it is measured, or if jobs report no steps.
    rate: float | None = None
    is_silent: bool = False  # jobs report no steps, so their speed will never be known


@dataclass(frozen=True)
class Packing:
    """How many jobs may run at once, and the speeds that decide it."""

    least: int  # the number of jobs with one per GPU
    limit: int
    # Samples per second, by the number of jobs.
    rates: Mapping[int, float] = field(default_factory=dict)
    is_saturated: bool = False  # more jobs do not raise the total speed

    def after(self, look: Look) -> Packing:
        """Return the packing after a look at the jobs.

        Jobs are added only while all jobs that may run have GPUs, memory has room for more, and the
        jobs added last have raised the total speed.
        """
        is_complete = look.on_gpus == self.limit and not look.waiting
        if self.is_saturated or not is_complete or not look.measured:
            return self
        if look.rate is None:
            return self.with_more(look) if look.is_silent else self
        rates = {**self.rates, self.limit: look.rate}
        fewer = max((number for number in rates if number < self.limit), default=0)
        added = self.limit - fewer
        if fewer and look.rate < rates[fewer] * (1 + _GAIN * added / fewer):
            return replace(self, limit=fewer, rates=rates, is_saturated=True)
        return replace(self, rates=rates).with_more(look)

    def with_more(self, look: Look) -> Packing:
        """Return the packing with up to one further job per GPU, as far as memory has room."""
        return replace(self, limit=self.limit + min(self.least, max(look.room, 0)))


@dataclass(frozen=True)
class GpuMemory:
    """The memory of a GPU, and how much of it all processes use, in bytes."""

    total_bytes: int
    used_bytes: int = 0


def room_for(need_bytes: int, gpus: Mapping[str, GpuMemory], jobs: Iterable[QueuedJob]) -> int:
    """Return how many further jobs fit by memory, if each takes one GPU.

    A job that accepts no others on its GPU leaves no room there. Programs outside the queue leave
    what they do not use.

    Args:
        need_bytes: the memory that each further job reserves.
        gpus: the GPUs of the sweep, by UUID.
        jobs: all jobs of the host.
    """
    if need_bytes <= 0:
        return 0
    used_outside = {uuid: gpu.used_bytes for uuid, gpu in gpus.items()}
    left = {uuid: gpu.total_bytes for uuid, gpu in gpus.items()}
    for job in jobs:
        for uuid, taken in zip(job.gpus, job.taken_bytes, strict=True):
            if uuid not in gpus:
                continue
            left[uuid] -= max(job.reserved_bytes, taken or 0)
            used_outside[uuid] -= job.reserved_bytes if taken is None else taken
            if job.jobs_per_device == 1:
                left[uuid] = 0
    room = 0
    for uuid, size in left.items():
        free = size - max(used_outside[uuid], 0)
        room += max(free, 0) // need_bytes
    return room


def largest_first(listed: Mapping[int, Sequence[str]]) -> dict[int, Sequence[str]]:
    """Return jobs with the largest micro-batches first, and jobs whose overrides name none last.

    Large jobs that come last would find no GPU with enough room, and run alone at the end.
    """
    numbers = sorted(listed, key=lambda number: (-_micro_batch(listed[number]), number))
    return {number: listed[number] for number in numbers}


def _micro_batch(overrides: Sequence[str]) -> int:
    matches = filter(None, map(_BATCH.fullmatch, overrides))
    return max((int(match[1]) for match in matches), default=0)


class Packer:
    """Watches the running jobs of a sweep, and decides how many may run at once.

    Args:
        settings: the settings of the sweep's jobs.
        least: the number of jobs at once with one job per GPU.
        gpus: the GPUs that the jobs may take, by UUID.
        read_gpus: reads the GPUs again. This costs a process, so it is called only before jobs are
            added.
    """

    def __init__(
        self,
        settings: RobustConfig,
        least: int,
        gpus: Mapping[str, GpuMemory],
        read_gpus: Callable[[], Mapping[str, GpuMemory]],
    ) -> None:
        self.packing = Packing(least, least)
        self._gpus = gpus
        self._read_gpus = read_gpus
        self._gpus_per_job = settings.num_gpus
        self._next_look = 0.0
        self._stage_began: float | None = None
        self._first: dict[str, int] = {}  # samples of each run folder when the stage began
        self._last: dict[str, int] = {}
        self._registry: Registry | None = None
        if settings.gpu_queue is not False and gpus:
            setting = None if settings.gpu_queue is True else str(settings.gpu_queue)
            with contextlib.suppress(QueueError):
                self._registry = Registry(directory_for(setting, os.environ))
        if self._registry is None:
            log.warning("gpu_jobs_per_device=auto needs GPUs and their queue: one job per GPU")

    def look(self, folders: Sequence[Path]) -> None:
        """Look at the jobs in these run folders, if the next look is due."""
        now = time.monotonic()
        if self._registry is None or now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        try:
            jobs = self._registry.jobs()
        except QueueError as problem:
            log.warning("%s: no more jobs share a GPU", problem)
            self._registry = None
            return
        before = self.packing
        after = before.after(self._look_at(folders, jobs, now))
        if after.limit > before.limit:
            # Programs outside the queue may have started since the GPUs were last read.
            self._gpus = self._read_gpus()
            after = before.after(self._look_at(folders, jobs, now))
            if after.limit == before.limit:
                self._next_look = now + _STAGE_SECONDS
        self.packing = after
        if after.limit == before.limit:
            return
        self._stage_began = None
        how = "share GPUs" if after.limit > before.limit else "are as fast together"
        log.info("%d jobs %s from here on", after.limit, how)

    def _look_at(self, folders: Sequence[Path], jobs: Sequence[QueuedJob], now: float) -> Look:
        """Read the queue and the run folders."""
        ours = {os.path.realpath(folder): folder for folder in folders}
        running = [job for job in jobs if os.path.realpath(job.run_dir) in ours and job.gpus]
        measured = [job for job in running if job.jobs_per_device > 1]
        waiting = len(folders) - len(running)
        states = [read_state(Path(job.run_dir)) for job in running]
        has_steps = all(_samples_of(state) for state in states)
        rate = None
        if len(running) == self.packing.limit:
            rate = self._rate(running, states, now)
        need_bytes = max((job.reserved_bytes for job in measured), default=0)
        return Look(
            on_gpus=len(running),
            waiting=waiting,
            measured=len(measured),
            room=room_for(need_bytes, self._gpus, jobs) // self._gpus_per_job,
            rate=rate,
            is_silent=not has_steps and len(measured) == len(running),
        )

    def _rate(
        self, running: Sequence[QueuedJob], states: Sequence[RunState | None], now: float
    ) -> float | None:
        """Return the samples per second since the limit of jobs was reached.

        A job that ended in that time and the job that replaced it both count. None if the time is
        too short.
        """
        samples = {
            job.run_dir: _samples_of(state) for job, state in zip(running, states, strict=True)
        }
        if self._stage_began is None:
            self._stage_began = now
            self._first = {}
            self._last = {}
        for run_dir, count in samples.items():
            self._first.setdefault(run_dir, count)
            self._last[run_dir] = max(count, self._last.get(run_dir, 0))
        seconds = now - self._stage_began
        done = sum(self._last[run_dir] - first for run_dir, first in self._first.items())
        if seconds < _STAGE_SECONDS or not done:
            return None
        return done / seconds


def _samples_of(state: RunState | None) -> int:
    """Return the samples that a job has trained on in its attempt, 0 if it has not reported any."""
    if state is None or state.attempt is None:
        return 0
    return (state.attempt.end_step or 0) * state.attempt.spec.effective_batch_size
