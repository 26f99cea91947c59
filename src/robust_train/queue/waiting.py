"""Wait until GPUs have room, with the host's other jobs or alone: a loop over polls.

Launchers use it before the first attempt, and between attempts.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from robust_train.gpu.inventory import close_session
from robust_train.gpu.processes import find_holders
from robust_train.gpu.select import can_be_one_of, could_ever_fit, label
from robust_train.gpu.visible import Visible
from robust_train.model.events import Event
from robust_train.model.gpu import Group
from robust_train.queue.host_queue import GpuRequest, HostQueue
from robust_train.queue.plan import LONGEST, Plan, why_waiting
from robust_train.queue.queue_dir import QueueError
from robust_train.queue.registry import QueuedJob
from robust_train.readable import MIB, as_clock, counted, mib, ordinal, shorten

_CLOSING_SECONDS = 2.0
_STATUS_SECONDS = 1.0
# The first waiting job polls most often, and jobs behind it less, all within UNSEEN_SECONDS.
_SHORTEST_PAUSE_SECONDS = 0.2
_POSITION_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 2.0
# Reading the records takes a tenth of the time, as far as the longest pause allows that.
_LISTING_FACTOR = 10.0
_SETTLE_SECONDS = 5.0
_UNANSWERED_SECONDS = 1.0


@dataclass(frozen=True)
class NoGpu:
    """The job does not get GPUs, and the reason."""

    reason: str


@dataclass(frozen=True)
class WaitStatus(Event):
    """Progress of the wait."""

    is_journaled = False

    seconds_left: float  # time until the waiting ends, may be infinite
    checks: int = 0  # grows by one with each poll that is reported
    # The reasons why no GPU will do now, the nearest obstacle first.
    obstacles: str = ""
    # The position in the queue of the host's jobs, from 1. 0 without a queue.
    position: int = 0

    def sentence(self) -> str:
        """Return one line of at most 120 characters for people."""
        where = "waiting for a GPU"
        if self.position:
            where = f"{ordinal(self.position)} in queue"
        if math.isfinite(self.seconds_left):
            where += f", {as_clock(math.ceil(self.seconds_left))} left"
        return shorten(f"{where}: {self.obstacles}", LONGEST)


def wait_for_gpus(
    queue: HostQueue,
    request: GpuRequest,
    # Called each second, and after each poll in vain.
    on_status: Callable[[WaitStatus], None] = lambda status: None,
    # Waits a number of seconds. An exception, for example of Ctrl-C, ends the waiting.
    sleep: Callable[[float], None] = time.sleep,
) -> Group | NoGpu:
    """Wait for GPUs and reserve them. A job that comes back keeps its ticket.

    Raises:
        ConfigError: the job could never start under the administrator's limit.
    """
    try:
        queue.join(request)
        return Waiting(request, queue, on_status, sleep).run()
    except QueueError as problem:
        queue.do_without(problem)
    finally:
        queue.withdraw()
    return Waiting(request, queue, on_status, sleep).run()


class Waiting:
    """The polls of a job, until it has its GPUs or gives up.

    Each poll reads the records of other jobs. Reading the GPUs costs more, so it is done only if a
    record has changed, for a few seconds after that, and once per check interval. Without a queue,
    the first job that finds a GPU free has it.
    """

    def __init__(
        self,
        request: GpuRequest,
        queue: HostQueue,
        on_status: Callable[[WaitStatus], None] = lambda status: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._request = request
        self._queue = queue
        self._on_status = on_status
        self._sleep = sleep
        self._next_report = self._next_status = time.monotonic()
        self._deadline = self._next_report + request.timeout_seconds
        self._status = WaitStatus(request.timeout_seconds)
        self._seen: list[QueuedJob] | None = None
        self._me = QueuedJob()
        self._position = 0
        self._obstacles = ""
        # Only programs outside of the queue are in the way. To name them costs a driver call.
        self._strangers_only = False
        self._next_read = self._settle_until = 0.0
        self._pause_seconds = 0.0

    def run(self) -> Group | NoGpu:
        """Return the best GPUs with enough free memory, as soon as there are enough of them.

        Returns at once if waiting cannot help. GPUs that vanish later may return.

        Raises:
            QueueError: the queue directory can no longer be used.
        """
        pointless = why_pointless(self._request, self._queue.read())
        if pointless:
            return NoGpu(pointless)
        while not (group := self.poll()):
            now = time.monotonic()
            has_moved = self._position != self._status.position
            if has_moved or now >= self._next_report:
                self._report()
            left = max(self._deadline - now, 0.0)
            # A job that has lost a race may find another GPU.
            if not left and self._next_read:
                return NoGpu(self._why_in_vain())
            if now >= self._next_status:
                self._next_status = now + _STATUS_SECONDS
                self._status = replace(self._status, seconds_left=left)
                self._on_status(self._status)
            next_read = self._next_read - max(now, self._settle_until)
            if next_read >= _CLOSING_SECONDS:
                close_session()  # an open session would block a reset of the GPUs
            self._sleep(min(self._pause_seconds, left or math.inf))
        return group

    def poll(self) -> Group:
        """Try once, and return the GPUs that the plan gives to the job, if any.

        Their ``free_bytes`` are the bytes that the job can count on. Otherwise the obstacles are
        noted for the next status.
        """
        started = time.monotonic()
        others = self._queue.others()
        cost_seconds = time.monotonic() - started
        seen = [replace(job, polled_at=float(job.is_polling(started))) for job in others]
        if seen != self._seen:
            # The memory of a job that has ended comes back a little later.
            settling = 0.0 if self._seen is None else _SETTLE_SECONDS
            self._settle_until = started + settling
            self._seen = seen
            self._next_read = started
        group: Group = ()
        is_due = started >= min(self._next_read, self._deadline)
        if is_due or started < self._settle_until:
            self._next_read = started + self._request.interval_seconds
            group = self._decide(others, started)
        else:
            self._queue.requeue(self._request, self._me.only)
        self._pause_seconds = min(_STATUS_SECONDS, self._next_read - started)
        if self._queue.is_shared:
            behind = _POSITION_SECONDS * (self._position - 1)
            pause = max(_SHORTEST_PAUSE_SECONDS + behind, _LISTING_FACTOR * cost_seconds)
            pause = min(pause, _LONGEST_PAUSE_SECONDS)
            self._pause_seconds = pause * random.uniform(0.5, 1.0)
        return group

    def _decide(self, others: Sequence[QueuedJob], now: float) -> Group:
        """Decide with the jobs as they were ``now``, because reading the GPUs may take seconds."""
        visible = self._queue.read()
        usable = (gpu.uuid for gpu in visible.gpus if self._request.allows(gpu))
        only = tuple(usable) if visible.inventory.answered else ()
        gpus = visible.machine
        self._me = me = self._queue.requeue(self._request, only)
        limit = self._queue.gpu_limit()
        decided = Plan([*others, me], gpus, now, limit)
        if self._queue.is_shared:
            self._position = decided.order.index(me) + 1
        self._strangers_only = False
        if not visible.inventory.answered:
            self._next_read = time.monotonic() + _UNANSWERED_SECONDS
            self._obstacles = visible.inventory.problem or ""
            return ()
        group = decided.groups.get(me.id, ())
        if group:
            uuids = [gpu.uuid for gpu in group]
            if self._queue.announce(uuids, me.reserved_bytes):
                return group
            # Another job has announced the same GPUs, so try again at the next poll.
            self._next_read = 0.0
        in_the_way = any(set(job.gpus) & set(me.only) for job in others)
        self._strangers_only = decided.order[0] == me and not in_the_way
        self._obstacles = why_waiting(me, others, gpus, decided, {})
        return ()

    def _report(self) -> None:
        self._next_report = time.monotonic() + self._request.interval_seconds
        self._next_status = 0.0
        strangers = self._strangers() if self._strangers_only else ""
        self._status = replace(
            self._status,
            checks=self._status.checks + 1,
            obstacles=strangers or self._obstacles,
            position=self._position,
        )

    def _strangers(self) -> str:
        """Name the programs outside of the queue that are in the way."""
        visible = self._queue.read(True)
        gpus = [gpu for gpu in visible.gpus if self._request.allows(gpu)]
        if not gpus:
            why = visible.inventory.problem or visible.warning
            return why or "the GPUs have vanished"
        decided = Plan((), gpus, 0.0)
        return why_waiting(self._me, (), gpus, decided, find_holders(gpus))

    def _why_in_vain(self) -> str:
        count = self._request.count
        seconds = self._request.timeout_seconds
        gpus = "GPU was" if count == 1 else f"{count} GPUs were"
        when = f"within {as_clock(math.ceil(seconds))}" if seconds else "now"
        return f"no {gpus} available {when}: {self._status.obstacles}"


def why_pointless(request: GpuRequest, visible: Visible) -> str:
    """Return why no amount of waiting would help, or an empty text if it could."""
    if not visible.inventory.answered:
        return ""
    if not visible.gpus:
        return visible.why_none
    count = request.count
    need = mib(request.min_bytes)
    if not any(can_be_one_of(gpu, count) for gpu in visible.gpus):
        return (
            f"num_gpus={count}: the GPUs here are MIG slices, which do not count for num_gpus "
            "(a program sees only one); use num_gpus=1"
        )
    gpus = [gpu for gpu in visible.gpus if request.allows(gpu)]
    if not gpus:
        named = ", ".join(sorted(request.only))
        return f"{named} is not among the GPUs that may be used here"
    possible = sum(could_ever_fit(gpu, request.min_bytes) for gpu in gpus)
    if possible >= count:
        return ""
    if possible:
        is_sliced = any(gpu.parent_uuid is not None for gpu in visible.gpus)
        slices = " (MIG slices do not count for num_gpus)" if is_sliced else ""
        gpus_here = counted(possible, "GPU")
        return (
            f"num_gpus={count}: only {gpus_here} here could ever give "
            f"{need}{slices}; ask for at most num_gpus={possible}, or less min_gpu_memory_mb"
        )
    fitting = [gpu for gpu in gpus if could_ever_fit(gpu, 1)]
    if not fitting:
        barred = "; ".join(f"{label(gpu)}: {gpu.unusable}" for gpu in gpus)
        return f"no GPU here can be used: {barred}"
    largest = max(fitting, key=lambda gpu: gpu.total_bytes)
    who = "this GPU could never" if request.only else "no GPU here could ever"
    return (
        f"{who} give {need}: the largest is {label(largest)}; ask for at most "
        f"min_gpu_memory_mb={largest.total_bytes // MIB}"
    )
