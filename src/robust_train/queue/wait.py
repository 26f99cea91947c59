"""Waiting until there is room on GPUs: a tenacity loop over looking and choosing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import tenacity

from robust_train.gpu.holders import Holder, find_holders
from robust_train.gpu.select import (
    can_be_one_of,
    choose_group,
    could_ever_fit,
    label,
    largest_possible,
    mib,
    needed,
    obstacles,
    rank,
)
from robust_train.gpu.visible import Visible
from robust_train.queue.line import Line, Turn
from robust_train.readable import as_clock, ordinal
from robust_train.values import GpuInfo, Group

_TICK_SECONDS = 1.0


@dataclass(frozen=True)
class GpuRequest:
    """What a job asks for.

    Attributes:
        min_bytes: free memory that it needs on each GPU.
        wait: whether to wait if there is not that much now.
        timeout_seconds: how long at most.
        interval_seconds: between two looks at the GPUs.
        exclude: UUIDs that are out of the question.
        only: UUIDs of the GPUs that will do, None for any.
        count: GPUs that it needs at once.
    """

    min_bytes: int
    wait: bool = True
    timeout_seconds: float = 3600.0
    interval_seconds: float = 30.0
    exclude: frozenset[str] = frozenset()
    only: frozenset[str] | None = None
    count: int = 1


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
        checks: how often the GPUs have been looked at; grows by one with each look.
        obstacles: why no GPU does now, with who holds them.
        position: place in the line of the host's jobs, 1 for the first.
        frees_next: NVML's numbers of the GPUs that the line waits for; none where not known.
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
        """One line for people."""
        if self.position > 1 or self.frees_next:
            # what matters most comes first: a narrow terminal cuts the end off
            return (
                f"{ordinal(self.position)} in line, needs {needed(self.min_bytes, self.count)}"
                f"{self._frees()}, {as_clock(math.ceil(self.seconds_left))} left; {self.obstacles}"
            )
        gpus = "a GPU" if self.count == 1 else f"{self.count} GPUs"
        each = "" if self.count == 1 else " each"
        return (
            f"waiting for {gpus} with {mib(self.min_bytes)} free{each}, "
            f"{as_clock(math.ceil(self.seconds_left))} left; {self.obstacles}"
        )

    def _frees(self) -> str:
        if not self.frees_next:
            return ""
        if len(self.frees_next) == 1:
            return f", GPU {self.frees_next[0]} frees next"
        return f", GPUs {', '.join(map(str, self.frees_next))} free next"


def wait_for_gpu(
    request: GpuRequest,
    *,
    read: Callable[[bool], Visible],
    announce: Callable[[WaitStatus], None],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    name_holders: Callable[[Sequence[GpuInfo]], Mapping[int, Holder]] = find_holders,
    line: Line | None = None,
) -> Group | NoGpu:
    """The best GPUs with enough free memory, as soon as there are as many as are asked for.

    Comes back at once where waiting is pointless: no GPU at all, or too few that could ever meet
    the request. GPUs that vanish later are waited for, since they may come back.

    Args:
        request: what is asked for.
        read: looks at the GPUs; its argument says whether to list processes, which is asked for
            once per look in vain, to tell who holds the GPUs.
        announce: is told how the waiting stands, after each look in vain and each second.
        sleep: waits some seconds; what it raises (Ctrl-C) ends the waiting.
        clock: seconds of a monotonic clock.
        name_holders: finds names for the processes on GPUs.
        line: where to stand among the host's jobs; None: whoever looks at the right moment wins.
            ``sleep`` has to return when the line's descriptor becomes readable.

    Raises:
        QueueProblem: the line's directory cannot be used any more.
    """
    return _Waiting(request, read, announce, sleep, clock, name_holders, line).run()


class _Waiting:
    """The loop's state: the deadline, and what was last said."""

    def __init__(
        self,
        request: GpuRequest,
        read: Callable[[bool], Visible],
        announce: Callable[[WaitStatus], None],
        sleep: Callable[[float], None],
        clock: Callable[[], float],
        name_holders: Callable[[Sequence[GpuInfo]], Mapping[int, Holder]],
        line: Line | None,
    ) -> None:
        self.request = request
        self.read = read
        self.announce = announce
        self.sleep = sleep
        self.clock = clock
        self.name_holders = name_holders
        self.line = line
        self.next_check = clock()
        self.pause_seconds = request.interval_seconds
        self.deadline = clock() + request.timeout_seconds
        self.status = WaitStatus(
            request.min_bytes, request.timeout_seconds, 0, "", count=request.count
        )

    def run(self) -> Group | NoGpu:
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_result(lambda found: found is None),
            stop=lambda state: self.clock() >= self.deadline,
            wait=lambda state: min(self.pause_seconds, self._seconds_left()),
            sleep=self._sleep_and_tell,
            retry_error_callback=lambda state: self._time_is_up(),
        )
        if self.line is not None and (pointless := _why_pointless(self.request, self.read(False))):
            return NoGpu(pointless)  # and no ticket taken
        # the loop ends with a result or with that of the callback
        return cast("Group | NoGpu", retrying(self._look))

    def _look(self) -> Group | NoGpu | None:
        if self.line is not None:
            return self._look_in(self.line)
        visible = self.read(False)
        suitable = rank(_candidates(self.request, visible), self.request.min_bytes)
        found = choose_group(suitable, self.request.count)
        if found:
            return found
        if self.status.checks == 0:
            pointless = _why_pointless(self.request, visible)
            if pointless is not None:
                return NoGpu(pointless)
        self.status = replace(
            self.status, checks=self.status.checks + 1, obstacles=self._obstacles()
        )
        return None if self.request.wait else self._not_now()

    def _look_in(self, line: Line) -> Group | NoGpu | None:
        """A look out of the line. It may be early, so what is told does not count each of them."""
        turn = line.look(lambda: self.read(False), lambda gpu: _may_use(self.request, gpu))
        if turn.gpus:
            return turn.gpus
        moved = turn.position != self.status.position
        self.pause_seconds = self.request.interval_seconds
        if turn.again_seconds is not None:
            self.pause_seconds = min(self.pause_seconds, turn.again_seconds)
        if moved or self.clock() >= self.next_check or not self.request.wait:
            self._note(turn)
        return None if self.request.wait else self._not_now()

    def _note(self, turn: Turn) -> None:
        self.next_check = self.clock() + self.request.interval_seconds
        self.status = replace(
            self.status,
            checks=self.status.checks + 1,
            # who else is on the GPUs matters where none of ours is
            obstacles=self._obstacles() if turn.strangers_only else turn.obstacles,
            position=turn.position,
            frees_next=() if turn.strangers_only else turn.frees_next,
        )

    def _obstacles(self) -> str:
        visible = self.read(True)
        gpus = _candidates(self.request, visible)
        if not gpus:
            return visible.problem or visible.warning or "the GPUs have vanished"
        return obstacles(gpus, holders=self.name_holders(gpus))

    def _sleep_and_tell(self, seconds: float) -> None:
        """Sleep in slices of a second, so that the time left can be shown counting down."""
        until = self.clock() + seconds
        while (left := until - self.clock()) > 0:
            self.status = replace(self.status, seconds_left=self._seconds_left())
            self.announce(self.status)
            self.sleep(min(left, _TICK_SECONDS, *self._slices()))
            if self.line is not None and self.line.woken():
                return

    def _slices(self) -> tuple[float, ...]:
        return () if self.line is None else (self.line.slice_seconds,)

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
    """Why no amount of waiting would help, or None."""
    if not visible.answered:
        return None  # a driver that hangs tells nothing
    gpus = _candidates(request, visible)
    if not gpus:
        if visible.gpus:
            if not any(can_be_one_of(gpu, request.count) for gpu in visible.gpus):
                return (
                    f"num_gpus={request.count}: the GPUs here are MIG slices, of which a program "
                    "sees only one; use num_gpus=1"
                )
            if request.only is not None:
                return (
                    f"{', '.join(sorted(request.only))} is not among the GPUs that may be used here"
                )
            return "every GPU here was given up earlier in this job"
        if visible.hidden_on_purpose:
            return "CUDA_VISIBLE_DEVICES hides every GPU"
        return visible.problem or visible.warning or "no GPU is visible"
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
