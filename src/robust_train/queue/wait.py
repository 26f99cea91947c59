"""Wait until there is room on GPUs: a tenacity loop over polling and choosing."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, TextIO, cast

import tenacity

from robust_train.gpu.nvml_session import close_session
from robust_train.gpu.processes import Holder, find_holders
from robust_train.gpu.select import (
    can_be_one_of,
    choose_group,
    could_ever_fit,
    label,
    largest_possible,
    needed,
    obstacles,
    rank,
)
from robust_train.gpu.visible import Visible
from robust_train.queue.queued_job import PollResult, QueuedJob
from robust_train.readable import as_clock, mib, ordinal
from robust_train.values import GpuInfo, Group

if TYPE_CHECKING:
    from rich.live import Live

log = logging.getLogger("robust_train")

_TICK_SECONDS = 1.0
_LONG_PAUSE_SECONDS = 2.0


@dataclass(frozen=True)
class GpuRequest:
    """What a job asks for.

    Attributes:
        min_bytes: free memory that it needs on each GPU.
        wait: whether to wait if there is not that much now.
        timeout_seconds: how long at most.
        interval_seconds: between two polls of the GPUs.
        only: UUIDs of the GPUs that will do, None for any.
        count: GPUs that it needs at once.
        exclude: UUIDs of GPUs that will not do.
    """

    min_bytes: int
    wait: bool = True
    timeout_seconds: float = 3600.0
    interval_seconds: float = 30.0
    only: frozenset[str] | None = None
    count: int = 1
    exclude: frozenset[str] = frozenset()


@dataclass(frozen=True)
class NoGpu:
    """There are no GPUs for the job: why, and whether that is because time was up."""

    reason: str
    timed_out: bool = False


@dataclass(frozen=True)
class WaitStatus:
    """How the waiting stands.

    Attributes:
        min_bytes: free memory that is waited for on each GPU.
        seconds_left: until the waiting is given up.
        checks: grows by one with each poll that is reported.
        obstacles: why no GPU does now, with who holds them.
        position: in the queue of the host's jobs, 1 for the first.
        frees_next: NVML's numbers of the GPUs that the queue waits for; none where not known.
        count: GPUs that are waited for.
    """

    min_bytes: int
    seconds_left: float
    checks: int
    obstacles: str
    position: int = 1
    frees_next: tuple[int, ...] = ()
    count: int = 1

    def sentence(self) -> str:
        """Return one line for people."""
        left = f"{as_clock(math.ceil(self.seconds_left))} left"
        why = " ".join(self.obstacles.split())
        if self.position > 1 or self.frees_next:
            # what matters most comes first: a narrow terminal cuts the end off
            need = needed(self.min_bytes, self.count)
            return f"{ordinal(self.position)} in queue, needs {need}{self._frees()}, {left}; {why}"
        gpus = "a GPU" if self.count == 1 else f"{self.count} GPUs"
        each = "" if self.count == 1 else " each"
        return f"waiting for {gpus} with {mib(self.min_bytes)} free{each}, {left}; {why}"

    def _frees(self) -> str:
        if not self.frees_next:
            return ""
        if len(self.frees_next) == 1:
            return f", GPU {self.frees_next[0]} frees next"
        return f", GPUs {', '.join(map(str, self.frees_next))} free next"


class StatusLine:
    """Shows a :class:`WaitStatus` again and again; a context manager that leaves no trace.

    On a terminal one line is rewritten in place. Elsewhere each poll gives one log line.

    Args:
        stream: standard error by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._live: Live | None = None
        self._logged_checks = 0

    def __enter__(self) -> StatusLine:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=self._stream, stderr=True, highlight=False)
        if console.is_interactive:
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, status: WaitStatus) -> None:
        """Show ``status`` now."""
        if self._live is not None:
            from rich.text import Text

            text = Text(status.sentence(), no_wrap=True, overflow="ellipsis")
            self._live.update(text, refresh=True)
        elif status.checks > self._logged_checks:
            self._logged_checks = status.checks
            log.info("%s", status.sentence())


def wait_for_gpu(
    request: GpuRequest,
    *,
    read: Callable[[bool], Visible],
    on_status: Callable[[WaitStatus], None],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    name_holders: Callable[[Sequence[GpuInfo]], Mapping[int, Holder]] = find_holders,
    queued: QueuedJob | None = None,
) -> Group | NoGpu:
    """Return the best GPUs with enough free memory, as soon as there are enough of them.

    Returns at once if waiting is pointless: no GPU at all, or too few that could ever meet the
    request. GPUs that vanish later are waited for, since they may come back.

    Args:
        request: what is asked for.
        read: reads the GPUs; its argument says whether to list processes, which is done once per
            poll in vain, to name who holds the GPUs.
        on_status: called after each poll in vain and each second.
        sleep: waits some seconds; what it raises (Ctrl-C) ends the waiting.
        clock: seconds of a monotonic clock.
        name_holders: finds names for the processes on GPUs.
        queued: this job in the host's queue; None: the first to find a GPU free has it. ``sleep``
            has to return when the job's descriptor becomes readable.

    Raises:
        QueueProblem: the queue directory cannot be used any more.
    """
    return _Waiting(request, read, on_status, sleep, clock, name_holders, queued).run()


class _Waiting:
    """The loop's state: the deadline, and the last status."""

    def __init__(
        self,
        request: GpuRequest,
        read: Callable[[bool], Visible],
        on_status: Callable[[WaitStatus], None],
        sleep: Callable[[float], None],
        clock: Callable[[], float],
        name_holders: Callable[[Sequence[GpuInfo]], Mapping[int, Holder]],
        queued: QueuedJob | None,
    ) -> None:
        self.request = request
        self.read = read
        self.on_status = on_status
        self.sleep = sleep
        self.clock = clock
        self.name_holders = name_holders
        self.queued = queued
        self.next_check = clock()
        self.pause_seconds = request.interval_seconds
        self.deadline = clock() + request.timeout_seconds
        self.status = WaitStatus(
            request.min_bytes, request.timeout_seconds, 0, "", count=request.count
        )

    def run(self) -> Group | NoGpu:
        if self.queued is not None and (why := _why_pointless(self.request, self.read(False))):
            return NoGpu(why)  # and no ticket taken
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_result(lambda found: found is None),
            stop=lambda state: self.clock() >= self.deadline,
            wait=lambda state: min(self.pause_seconds, self._seconds_left()),
            sleep=self._pause,
            retry_error_callback=lambda state: self._time_is_up(),
        )
        # the loop ends with a result or with that of the callback
        return cast("Group | NoGpu", retrying(self._poll))

    def _poll(self) -> Group | NoGpu | None:
        if self.queued is not None:
            return self._poll_in_queue(self.queued)
        visible = self.read(False)
        suitable = rank(_candidates(self.request, visible), self.request.min_bytes)
        found = choose_group(suitable, self.request.count)
        if found:
            return found
        if self.status.checks == 0 and (why := _why_pointless(self.request, visible)):
            return NoGpu(why)
        self.status = replace(
            self.status, checks=self.status.checks + 1, obstacles=self._obstacles()
        )
        return None if self.request.wait else self._not_now()

    def _poll_in_queue(self, queued: QueuedJob) -> Group | NoGpu | None:
        """Poll the queue; there are more polls than intervals, so not each of them is reported."""
        found = queued.poll(lambda: self.read(False), lambda gpu: _may_use(self.request, gpu))
        if found.gpus:
            return found.gpus
        has_moved = found.position != self.status.position
        self.pause_seconds = self.request.interval_seconds
        if found.again_seconds is not None:
            self.pause_seconds = min(self.pause_seconds, found.again_seconds)
        if has_moved or self.clock() >= self.next_check or not self.request.wait:
            self._report(found)
        return None if self.request.wait else self._not_now()

    def _report(self, found: PollResult) -> None:
        self.next_check = self.clock() + self.request.interval_seconds
        self.status = replace(
            self.status,
            checks=self.status.checks + 1,
            # who else is on the GPUs matters where none of ours is
            obstacles=self._obstacles() if found.strangers_only else found.obstacles,
            position=found.position,
            frees_next=() if found.strangers_only else found.frees_next,
        )

    def _obstacles(self) -> str:
        visible = self.read(True)
        gpus = _candidates(self.request, visible)
        if not gpus:
            return visible.problem or visible.warning or "the GPUs have vanished"
        return obstacles(gpus, holders=self.name_holders(gpus))

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

    def _not_now(self) -> NoGpu:
        count, need = self.request.count, mib(self.request.min_bytes)
        what = f"no GPU has {need} free now"
        if count > 1:
            what = f"there are no {count} GPUs that have {need} free each now"
        return NoGpu(f"{what}: {self.status.obstacles}")

    def _time_is_up(self) -> NoGpu:
        count, need = self.request.count, mib(self.request.min_bytes)
        what = f"no GPU had {need} free"
        if count > 1:
            what = f"there were no {count} GPUs that had {need} free each"
        waited = as_clock(math.ceil(self.request.timeout_seconds))
        return NoGpu(f"{what} within {waited}: {self.status.obstacles}", timed_out=True)


def _candidates(request: GpuRequest, visible: Visible) -> list[GpuInfo]:
    return [gpu for gpu in visible.gpus if _may_use(request, gpu)]


def _may_use(request: GpuRequest, gpu: GpuInfo) -> bool:
    is_named = request.only is None or gpu.uuid in request.only
    return is_named and gpu.uuid not in request.exclude and can_be_one_of(gpu, request.count)


def _why_pointless(request: GpuRequest, visible: Visible) -> str | None:
    """Return why no amount of waiting would help, or None."""
    if not visible.answered:
        return None  # a driver that hangs says nothing
    gpus = _candidates(request, visible)
    if not gpus:
        return _why_no_candidate(request, visible)
    possible = sum(could_ever_fit(gpu, request.min_bytes) for gpu in gpus)
    if possible >= request.count:
        return None
    if possible:
        only = f"only {possible} GPU{'s' if possible > 1 else ''} here"
        return (
            f"num_gpus={request.count}: {only} could ever give {mib(request.min_bytes)}; "
            "ask for fewer GPUs (num_gpus) or less memory (min_gpu_memory_mb)"
        )
    largest = largest_possible(gpus)
    if largest is None:
        barred = "; ".join(f"{label(gpu)}: {gpu.unusable}" for gpu in gpus)
        return f"no GPU here can be used: {barred}"
    whose = "no GPU here" if request.only is None else "this GPU never"
    return (
        f"{whose} could ever give {mib(request.min_bytes)}: the largest is {label(largest)} with "
        f"{mib(largest.total_bytes)} in total; ask for less (min_gpu_memory_mb)"
    )


def _why_no_candidate(request: GpuRequest, visible: Visible) -> str:
    if not visible.gpus:
        return visible.why_none
    if not any(can_be_one_of(gpu, request.count) for gpu in visible.gpus):
        return (
            f"num_gpus={request.count}: the GPUs here are MIG slices, of which a program sees only "
            "one; use num_gpus=1"
        )
    named = ", ".join(sorted(request.only or ()))
    return f"{named} is not among the GPUs that may be used here"
