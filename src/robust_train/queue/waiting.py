"""Wait until there is room on GPUs: a loop over polls."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from robust_train.gpu.nvml_session import close_session
from robust_train.gpu.processes import find_holders
from robust_train.gpu.select import (
    can_be_one_of,
    choose_group,
    could_ever_fit,
    label,
    rank,
)
from robust_train.gpu.visible import Visible
from robust_train.queue.order import WaitingJob
from robust_train.queue.queued_job import PollResult, QueuedJob
from robust_train.queue.reasons import LONGEST, why_waiting
from robust_train.queue.scheduler import Plan
from robust_train.readable import as_clock, mib, ordinal, shortened
from robust_train.values import MIB, GpuInfo, Group

_TICK_SECONDS = 1.0
_LONG_PAUSE_SECONDS = 2.0


@dataclass(frozen=True)
class GpuRequest:
    """A job's request."""

    min_bytes: int  # free memory that it needs on each GPU
    wait: bool = True  # whether to wait if there is not that much now
    timeout_seconds: float = 3600.0  # how long at most
    interval_seconds: float = 30.0  # between two polls of the GPUs
    only: frozenset[str] | None = None  # UUIDs of the GPUs that will do, None for any
    count: int = 1  # GPUs that it needs at once
    exclude: frozenset[str] = frozenset()  # UUIDs of GPUs that will not do

    def allows(self, gpu: GpuInfo) -> bool:
        """Return whether the job may use a GPU at all."""
        is_named = self.only is None or gpu.uuid in self.only
        return is_named and gpu.uuid not in self.exclude and can_be_one_of(gpu, self.count)


@dataclass(frozen=True)
class NoGpu:
    """There are no GPUs for the job: why, and whether that is because time was up."""

    reason: str
    timed_out: bool = False


@dataclass(frozen=True)
class WaitStatus:
    """Progress of the waiting."""

    seconds_left: float  # until the waiting ends
    checks: int  # grows by one with each poll that is reported
    obstacles: str  # why no GPU does now, the nearest obstacle first
    position: int = 1  # in the queue of the host's jobs, 1 for the first; 0 without a queue

    def sentence(self) -> str:
        """Return one line of at most 120 characters for people."""
        left = f"{as_clock(math.ceil(self.seconds_left))} left"
        where = f"{ordinal(self.position)} in queue" if self.position else "waiting for a GPU"
        return shortened(f"{where}, {left}: {self.obstacles}", LONGEST)


def wait_for_gpu(
    request: GpuRequest,  # what the job needs
    *,
    # reads the GPUs; its argument asks for their processes too, once per report
    read: Callable[[bool], Visible],
    on_status: Callable[[WaitStatus], None],  # called after each poll in vain and each second
    # waits some seconds; what it raises (Ctrl-C) ends the waiting
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,  # seconds of a monotonic clock
    # this job in the host's queue; None: the first to find a GPU free has it. `sleep` has to
    # return when the job's descriptor becomes readable.
    queued: QueuedJob | None = None,
) -> Group | NoGpu:
    """Return the best GPUs with enough free memory, as soon as there are enough of them.

    Returns at once if no amount of waiting could help. GPUs that vanish later may come back.

    Raises:
        QueueProblem: the queue directory cannot be used any more.
    """
    return _Waiting(request, read, on_status, sleep, clock, queued).run()


@dataclass
class _Waiting:
    """The loop's state: the deadline, and the last status."""

    request: GpuRequest
    read: Callable[[bool], Visible]
    on_status: Callable[[WaitStatus], None]
    sleep: Callable[[float], None]
    clock: Callable[[], float]
    queued: QueuedJob | None

    def __post_init__(self) -> None:
        self.next_report = self.clock()
        self.pause_seconds = self.request.interval_seconds
        self.deadline = self.clock() + self.request.timeout_seconds
        self.status = WaitStatus(self.request.timeout_seconds, 0, "")

    def run(self) -> Group | NoGpu:
        if why := why_pointless(self.request, self.read(False)):
            return NoGpu(why)
        while (found := self._poll()) is None:
            if self.clock() >= self.deadline:
                return self._in_vain(timed_out=True)
            self._pause(min(self.pause_seconds, self._seconds_left()))
        return found

    def _poll(self) -> Group | NoGpu | None:
        if self.queued is None:
            found = self._poll_alone()
        else:
            found = self.queued.poll(partial(self.read, False), self.request.allows)
        if found.gpus:
            return found.gpus
        self.pause_seconds = self.request.interval_seconds
        if found.again_seconds is not None:
            self.pause_seconds = min(self.pause_seconds, found.again_seconds)
        # a queue is polled more often than once per interval
        has_moved = found.position != self.status.position
        if has_moved or self.clock() >= self.next_report or not self.request.wait:
            self._report(found)
        return None if self.request.wait else self._in_vain(timed_out=False)

    def _poll_alone(self) -> PollResult:
        self.next_report = self.clock()
        gpus = [gpu for gpu in self.read(False).gpus if self.request.allows(gpu)]
        group = choose_group(rank(gpus, self.request.min_bytes), self.request.count)
        return PollResult(group, position=0, strangers_only=True)

    def _report(self, found: PollResult) -> None:
        self.next_report = self.clock() + self.request.interval_seconds
        self.status = replace(
            self.status,
            checks=self.status.checks + 1,
            # who else is on the GPUs matters where none of our jobs is
            obstacles=self._obstacles() if found.strangers_only else found.obstacles,
            position=found.position,
        )

    def _obstacles(self) -> str:
        visible = self.read(True)
        gpus = [gpu for gpu in visible.gpus if self.request.allows(gpu)]
        if not gpus:
            return visible.problem or visible.warning or "the GPUs have vanished"
        only = frozenset(gpu.uuid for gpu in gpus)
        me = WaitingJob("", 0, self.request.min_bytes, only, count=self.request.count)
        return why_waiting(me, (), gpus, Plan(), find_holders(gpus))

    def _pause(self, seconds: float) -> None:
        """Sleep in slices of a second, so that the time left can be shown counting down."""
        until = self.clock() + seconds
        if seconds >= _LONG_PAUSE_SECONDS:
            close_session()  # an open one would block a reset of the GPUs
        while (left := until - self.clock()) > 0:
            self.status = replace(self.status, seconds_left=self._seconds_left())
            self.on_status(self.status)
            self.sleep(min(left, _TICK_SECONDS))
            if self.queued is not None and self.queued.has_changed():
                # not in one go with all the others
                if (pause := min(self.queued.pause_seconds, self._seconds_left())) > 0:
                    time.sleep(pause)
                return

    def _seconds_left(self) -> float:
        return max(self.deadline - self.clock(), 0.0)

    def _in_vain(self, *, timed_out: bool) -> NoGpu:
        count = self.request.count
        what = "no GPU was available" if count == 1 else f"no {count} GPUs were available"
        when = f"within {as_clock(math.ceil(self.request.timeout_seconds))}" if timed_out else "now"
        return NoGpu(f"{what} {when}: {self.status.obstacles}", timed_out)


def why_pointless(request: GpuRequest, visible: Visible) -> str | None:
    """Return why no amount of waiting would help, or None."""
    if not visible.answered:
        return None
    if not visible.gpus:
        return visible.why_none
    count, need = request.count, mib(request.min_bytes)
    if not any(can_be_one_of(gpu, count) for gpu in visible.gpus):
        return (
            f"num_gpus={count}: the GPUs here are MIG slices, which do not count for num_gpus "
            "(a program sees only one); use num_gpus=1"
        )
    gpus = [gpu for gpu in visible.gpus if request.allows(gpu)]
    if not gpus:
        named = ", ".join(sorted(request.only or ()))
        return f"{named} is not among the GPUs that may be used here"
    possible = sum(could_ever_fit(gpu, request.min_bytes) for gpu in gpus)
    if possible >= count:
        return None
    if possible:
        is_sliced = any(gpu.parent_uuid is not None for gpu in visible.gpus)
        slices = " (MIG slices do not count for num_gpus)" if is_sliced else ""
        return (
            f"num_gpus={count}: only {possible} GPU{'s' * (possible > 1)} here could ever give "
            f"{need}{slices}; ask for at most num_gpus={possible}, or less min_gpu_memory_mb"
        )
    fitting = [gpu for gpu in gpus if could_ever_fit(gpu, 1)]
    if not fitting:
        barred = "; ".join(f"{label(gpu)}: {gpu.unusable}" for gpu in gpus)
        return f"no GPU here can be used: {barred}"
    largest = max(fitting, key=lambda gpu: gpu.total_bytes)
    who = "no GPU here could ever" if request.only is None else "this GPU could never"
    return (
        f"{who} give {need}: the largest is {label(largest)}; ask for at most "
        f"min_gpu_memory_mb={largest.total_bytes // MIB}"
    )
