"""Wait until there is room on GPUs: a loop over polls."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

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
from robust_train.model.gpu import GpuInfo, Group
from robust_train.queue.plan import LONGEST, Plan, why_waiting
from robust_train.queue.registry import QueuedJob
from robust_train.readable import MIB, as_clock, mib, ordinal, shortened

_CLOSING_SECONDS = 2.0
_STATUS_SECONDS = 1.0


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
        return (
            is_named and gpu.uuid not in self.exclude and can_be_one_of(gpu, self.count)
        )


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
    position: int = (
        1  # in the queue of the host's jobs, 1 for the first; 0 without a queue
    )

    def sentence(self) -> str:
        """Return one line of at most 120 characters for people."""
        left = f"{as_clock(math.ceil(self.seconds_left))} left"
        where = (
            f"{ordinal(self.position)} in queue"
            if self.position
            else "waiting for a GPU"
        )
        return shortened(f"{where}, {left}: {self.obstacles}", LONGEST)


@dataclass(frozen=True)
class PollResult:
    """Result of one scheduling attempt."""

    gpus: Group = ()  # the job's GPUs, `free_bytes` as far as it can count on them; none: wait on
    position: int = 0  # in the queue, 1 for the first; 0 without a queue
    obstacles: str = ""  # why it waits, in one sentence
    # only programs outside of the queue are in the way: their names are worth a call of the driver
    strangers_only: bool = False
    pause_seconds: float = 0.0  # until the next poll
    read_again_seconds: float = (
        0.0  # until the GPUs are read again, unless a record changes
    )


def wait_for_gpu(
    request: GpuRequest,
    *,
    # reads the GPUs; its argument asks for their processes too, once per report
    read: Callable[[bool], Visible],
    on_status: Callable[
        [WaitStatus], None
    ],  # called each second, and after each poll in vain
    # waits some seconds; what it raises (Ctrl-C) ends the waiting
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,  # seconds of a monotonic clock
    # asks the host's queue; None: the first to find a GPU free has it
    poll: Callable[[], PollResult] | None = None,
) -> Group | NoGpu:
    """Return the best GPUs with enough free memory, as soon as there are enough of them.

    Returns at once if no amount of waiting could help. GPUs that vanish later may come back.

    Raises:
        QueueProblem: the queue directory cannot be used any more.
    """
    if why := why_pointless(request, read(False)):
        return NoGpu(why)
    return _Waiting(request, read, on_status, sleep, clock, poll).run()


class _Waiting:
    """The loop over polls, and the last status."""

    def __init__(
        self,
        request: GpuRequest,
        read: Callable[[bool], Visible],
        on_status: Callable[[WaitStatus], None],
        sleep: Callable[[float], None],
        clock: Callable[[], float],
        poll: Callable[[], PollResult] | None,
    ) -> None:
        self._request = request
        self._read = read
        self._on_status = on_status
        self._sleep = sleep
        self._clock = clock
        self._poll = poll or self._poll_alone
        self._next_report = self._next_status = clock()
        self._deadline = clock() + request.timeout_seconds
        self._status = WaitStatus(request.timeout_seconds, 0, "")

    def run(self) -> Group | NoGpu:
        while True:
            found = self._poll()
            if found.gpus:
                return found.gpus
            has_moved = found.position != self._status.position
            if (
                has_moved
                or self._clock() >= self._next_report
                or not self._request.wait
            ):
                self._report(found)
            if not self._request.wait:
                return self._in_vain(timed_out=False)
            if self._clock() >= self._deadline:
                return self._in_vain(timed_out=True)
            if found.read_again_seconds >= _CLOSING_SECONDS:
                close_session()  # an open one would block a reset of the GPUs
            self._pause(min(found.pause_seconds, self._seconds_left()))

    def _poll_alone(self) -> PollResult:
        self._next_report = self._clock()
        gpus = [gpu for gpu in self._read(False).gpus if self._request.allows(gpu)]
        group = choose_group(rank(gpus, self._request.min_bytes), self._request.count)
        interval_seconds = self._request.interval_seconds
        return PollResult(
            group,
            strangers_only=True,
            pause_seconds=interval_seconds,
            read_again_seconds=interval_seconds,
        )

    def _report(self, found: PollResult) -> None:
        self._next_report = self._clock() + self._request.interval_seconds
        self._next_status = self._clock()
        self._status = replace(
            self._status,
            checks=self._status.checks + 1,
            obstacles=self._strangers() if found.strangers_only else found.obstacles,
            position=found.position,
        )

    def _strangers(self) -> str:
        """Return which programs outside of the queue are in the way."""
        visible = self._read(True)
        gpus = [gpu for gpu in visible.gpus if self._request.allows(gpu)]
        if not gpus:
            return visible.problem or visible.warning or "the GPUs have vanished"
        me = QueuedJob(
            only=tuple(gpu.uuid for gpu in gpus),
            reserved_bytes=self._request.min_bytes,
            count=self._request.count,
        )
        return why_waiting(me, (), gpus, Plan(), find_holders(gpus))

    def _pause(self, seconds: float) -> None:
        """Sleep in slices of a second, so that the time left can be shown counting down."""
        until = self._clock() + seconds
        while (left := until - self._clock()) > 0:
            if self._clock() >= self._next_status:
                self._next_status = self._clock() + _STATUS_SECONDS
                self._status = replace(self._status, seconds_left=self._seconds_left())
                self._on_status(self._status)
            self._sleep(min(left, _STATUS_SECONDS))

    def _seconds_left(self) -> float:
        return max(self._deadline - self._clock(), 0.0)

    def _in_vain(self, *, timed_out: bool) -> NoGpu:
        count = self._request.count
        what = (
            "no GPU was available" if count == 1 else f"no {count} GPUs were available"
        )
        within = as_clock(math.ceil(self._request.timeout_seconds))
        when = f"within {within}" if timed_out else "now"
        return NoGpu(f"{what} {when}: {self._status.obstacles}", timed_out)


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
