"""Waits until GPUs have room for a job, in the host's queue or without it.

:class:`.devices.Devices` calls :func:`wait_for_gpus` in the launcher's process, before the first
attempt and between attempts. The wait is a loop: each poll reads the records of the other jobs,
plans which job gets which GPUs (:mod:`.plan`), and reserves the GPUs if the plan gives them to this
job.
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

# The NVML session is closed if the GPUs are not read for this long.
_CLOSING_SECONDS = 2.0
_STATUS_SECONDS = 1.0
# The first waiting job polls most often, and each job behind it less often. Every job polls within
# UNSEEN_SECONDS, so that no job counts as stopped.
_SHORTEST_PAUSE_SECONDS = 0.2
_POSITION_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 2.0
# The pause is at least ten times as long as reading the records took.
_LISTING_FACTOR = 10.0
# How long each poll reads the GPUs after a record has changed.
_SETTLE_SECONDS = 5.0
# When to read the GPUs again if the driver did not answer.
_UNANSWERED_SECONDS = 1.0


@dataclass(frozen=True)
class NoGpu:
    """Why a job does not get GPUs."""

    reason: str


@dataclass(frozen=True)
class WaitStatus(Event):
    """The progress of a wait."""

    is_journaled = False

    seconds_left: float  # time until the wait ends, may be infinite
    checks: int = 0  # number of reports so far
    obstacles: str = ""  # why no GPU is available, the nearest obstacle first
    position: int = 0  # position in the host's queue from 1, or 0 without a queue

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
    on_status: Callable[[WaitStatus], None] = lambda status: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Group | NoGpu:
    """Wait for GPUs and reserve them. A job that waits again keeps its ticket.

    Args:
        queue: the job's access to the host's queue.
        request: the GPUs that the job requests.
        on_status: called about once a second, and after each report.
        sleep: waits for some seconds. An exception that it raises ends the wait.

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
    """Polls for a job until it has its GPUs or its time is over.

    Each poll reads the records of other jobs. Reading the GPUs costs more, so a poll reads them
    only if a record has changed, for a few seconds after that, and once per check interval. Without
    a queue, the job that first finds a GPU free takes it.
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
        self._next_report = time.monotonic()
        self._next_status = self._next_report
        self._deadline = self._next_report + request.timeout_seconds
        self._status = WaitStatus(request.timeout_seconds)
        self._seen: list[QueuedJob] | None = None  # the other jobs at the last poll
        self._me = QueuedJob()  # the record of this job
        self._position = 0
        self._obstacles = ""
        # Whether only programs outside of the queue use the GPUs. To name them costs a driver call.
        self._strangers_only = False
        self._next_read = 0.0  # when to read the GPUs again, 0 if they were not read yet
        self._settle_until = 0.0
        self._pause_seconds = 0.0

    def run(self) -> Group | NoGpu:
        """Wait for enough GPUs with enough free memory, and return the best of them.

        Returns at once if waiting cannot help. A GPU that disappears during the wait may return.

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
            # `_next_read` is 0 after a lost race, because the job may still find another GPU.
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
        """Try once to get GPUs. Returns the GPUs that the plan gives to the job, if any.

        Their ``free_bytes`` is the memory that the job can rely on. If the job gets no GPU, the
        obstacles are kept for the next status.
        """
        started = time.monotonic()
        others = self._queue.others()
        cost_seconds = time.monotonic() - started
        seen = [replace(job, polled_at=float(job.is_polling(started))) for job in others]
        if seen != self._seen:
            # The driver frees the memory of a job some time after the job has ended.
            self._settle_until = started
            if self._seen is not None:
                self._settle_until += _SETTLE_SECONDS
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
        """Plan with the records of other jobs, and reserve the GPUs that the plan gives to the job.

        Args:
            others: the records of the other jobs.
            now: when the records were read, since reading the GPUs may take seconds.
        """
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
        jobs_use_gpus = any(set(job.gpus) & set(me.only) for job in others)
        self._strangers_only = decided.order[0] == me and not jobs_use_gpus
        self._obstacles = why_waiting(me, others, gpus, decided, {})
        return ()

    def _report(self) -> None:
        """Update the obstacles and the position in the status."""
        self._next_report = time.monotonic() + self._request.interval_seconds
        self._next_status = 0.0
        obstacles = self._obstacles
        if self._strangers_only:
            obstacles = self._name_strangers() or obstacles
        self._status = replace(
            self._status,
            checks=self._status.checks + 1,
            obstacles=obstacles,
            position=self._position,
        )

    def _name_strangers(self) -> str:
        """Return the obstacles, with the names of programs outside of the queue."""
        visible = self._queue.read(True)
        gpus = [gpu for gpu in visible.gpus if self._request.allows(gpu)]
        if not gpus:
            why = visible.inventory.problem or visible.warning
            return why or "the GPUs have vanished"
        decided = Plan((), gpus, 0.0)
        return why_waiting(self._me, (), gpus, decided, find_holders(gpus))

    def _why_in_vain(self) -> str:
        """Return the reason why the wait ended without GPUs."""
        count = self._request.count
        seconds = self._request.timeout_seconds
        gpus = "GPU was" if count == 1 else f"{count} GPUs were"
        when = f"within {as_clock(math.ceil(seconds))}" if seconds else "now"
        return f"no {gpus} available {when}: {self._status.obstacles}"


def why_pointless(request: GpuRequest, visible: Visible) -> str:
    """Return why waiting could never help, or an empty string if it could."""
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
        slices = ""
        if any(gpu.parent_uuid is not None for gpu in visible.gpus):
            slices = " (MIG slices do not count for num_gpus)"
        gpus_here = counted(possible, "GPU")
        return (
            f"num_gpus={count}: only {gpus_here} here could ever give "
            f"{need}{slices}; ask for at most num_gpus={possible}, or less min_gpu_memory_mb"
        )
    usable = [gpu for gpu in gpus if could_ever_fit(gpu, 1)]
    if not usable:
        reasons = "; ".join(f"{label(gpu)}: {gpu.unusable}" for gpu in gpus)
        return f"no GPU here can be used: {reasons}"
    largest = max(usable, key=lambda gpu: gpu.total_bytes)
    subject = "this GPU could never" if request.only else "no GPU here could ever"
    return (
        f"{subject} give {need}: the largest is {label(largest)}; ask for at most "
        f"min_gpu_memory_mb={largest.total_bytes // MIB}"
    )
