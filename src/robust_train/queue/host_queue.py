"""Represents one job in the host's queue: first its queue position, then its reservation.

:class:`.devices.Devices` and :mod:`.waiting` use a :class:`HostQueue` in the launcher's process. If
the queue directory cannot be used, the job logs a warning, and then chooses GPUs by their free
memory alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from robust_train.gpu.inventory import close_session
from robust_train.gpu.processes import user_name
from robust_train.gpu.select import can_be_one_of
from robust_train.gpu.visible import Visible
from robust_train.model.errors import ConfigError
from robust_train.model.gpu import GpuInfo
from robust_train.queue.plan import find_job_to_yield_to, find_open_gpus, has_room, room_on_own_gpus
from robust_train.queue.queue_dir import EXCLUDED_SECONDS, LIMITS_FILE, NO_LIMIT, QueueError
from robust_train.queue.registry import QueuedJob, Registry, Reservation

log = logging.getLogger("robust_train")

_LOOK_SECONDS = 60.0  # time between two checks for idle GPUs
_SEEN_SECONDS = 1.0  # time after which a waiting job records again that it polls
_NAMELESS = QueuedJob()


@dataclass(frozen=True)
class GpuRequest:
    """The GPUs that a job requests."""

    min_bytes: int  # free memory that the job needs on each GPU
    timeout_seconds: float = 3600.0  # the longest wait, 0 to decide now
    interval_seconds: float = 30.0  # time between two polls of the GPUs
    only: frozenset[str] = frozenset()  # UUIDs of acceptable GPUs, empty for any GPU
    count: int = 1  # number of GPUs that the job needs at once
    exclude: frozenset[str] = frozenset()  # UUIDs of unacceptable GPUs

    def allows(self, gpu: GpuInfo) -> bool:
        """Return whether the job may use a GPU at all."""
        is_named = not self.only or gpu.uuid in self.only
        return is_named and gpu.uuid not in self.exclude and can_be_one_of(gpu, self.count)


class HostQueue:
    """One job's access to the host's queue, or its substitute without a queue.

    Args:
        directory: the queue directory, None for a job without reservations.
        read: reads the GPUs, with their processes if its argument is true.
        job: the job's name, run folder, jobs per GPU and urgency.
        token: marks the job's processes and its record, six hexadecimal digits. Empty for a new
            token.
    """

    def __init__(
        self,
        directory: Path | None,
        read: Callable[[bool], Visible],
        job: QueuedJob = _NAMELESS,
        token: str = "",
    ) -> None:
        self.read_machine = read
        self._directory = directory
        self._job = job  # the job's record when it last entered the queue
        self._token = token
        self._registry: Registry | None = None
        self._reservation: Reservation | None = None
        self._busy_at: dict[str, float] = {}
        self._next_look = 0.0

    @property
    def job_id(self) -> str:
        """The id of its record in the queue, empty before the job had a ticket."""
        return self._job.id

    @property
    def hold(self) -> tuple[int, ...]:
        """The descriptor that keeps the reservation alive, if any."""
        return () if self._reservation is None else (self._reservation.fd,)

    @property
    def is_shared(self) -> bool:
        """Whether the job shares the GPUs through a queue."""
        return self._registry is not None

    def join(self, request: GpuRequest) -> None:
        """Open the queue directory, if this job has one.

        Raises:
            QueueError: the queue directory cannot be used.
            ConfigError: the job could never start under the administrator's limit.
        """
        self._busy_at = {}
        if self._registry is None and self._directory is not None:
            self._registry = Registry(self._directory)
            if self._registry.owner not in (0, os.geteuid()):
                log.warning(
                    "the queue directory %s belongs to user %s, who could remove other jobs' "
                    "reservations (robust-train doctor shows how to give it to root)",
                    self._directory,
                    user_name(self._registry.owner),
                )
        if self.job_id:
            return  # a job that is queued already waits if root has lowered the limit
        limit = self.gpu_limit()
        if request.count > limit:
            raise ConfigError(
                f"num_gpus={request.count}: this machine's {LIMITS_FILE} has max_gpus_per_user: "
                f"{limit}; ask for at most num_gpus={limit}"
            )

    def withdraw(self) -> None:
        """Leave the queue if the job has no GPUs."""
        if self._reservation is not None and not self._reservation.job.gpus:
            self._reservation.release()
            self._reservation = None

    def others(self) -> list[QueuedJob]:
        """Return all other living jobs."""
        jobs = [] if self._registry is None else self._registry.jobs()
        return [job for job in jobs if job.id != self.job_id]

    def gpu_limit(self) -> int:
        """Return the maximum number of GPUs that a user may hold."""
        return NO_LIMIT if self._registry is None else self._registry.gpu_limit()

    def read(self, processes: bool = False) -> Visible:
        """Return all GPUs that the job may use, with the exclusions of the host's jobs."""
        visible = self.read_machine(processes)
        registry = self._registry
        if registry is None:
            return visible
        marked = registry.mark_excluded(visible.machine)
        return replace(
            visible,
            gpus=registry.mark_excluded(visible.gpus),
            inventory=replace(visible.inventory, gpus=marked),
        )

    def requeue(self, request: GpuRequest, only: tuple[str, ...]) -> QueuedJob:
        """Record the GPUs for which the job waits, and return the record.

        The job keeps its ticket if it has one.
        """
        now = time.monotonic()
        reservation = self._reservation
        job = self._job if reservation is None else reservation.job
        job = job.on((), reserved_bytes=request.min_bytes, count=request.count, only=only)
        if self._registry is None:
            return replace(job, id="alone", polled_at=now)
        if reservation is None:
            self._reservation = self._registry.enter(job, self._token)
            self._job = self._reservation.job
            return self._job
        # A job that could not take any GPU does not count as polling, so later jobs overtake it.
        if only and now - job.polled_at >= _SEEN_SECONDS:
            job = replace(job, polled_at=now)
        reservation.update(job)
        return reservation.job

    def announce(self, uuids: Sequence[str], need_bytes: int) -> bool:
        """Reserve GPUs if they have room: write the record first, then read the other records.

        If two jobs announce the same room at once, both see the other and withdraw. The records are
        read before the GPUs, so memory that a job allocates in between counts twice rather than not
        at all.

        Returns:
            Whether the job has the GPUs.

        Raises:
            QueueError: the record cannot be written.
        """
        reservation = self._reservation
        if reservation is None:
            return True
        before = reservation.job
        # A job that moves keeps its old GPUs until it has the new ones.
        both = dict.fromkeys(before.gpus + tuple(uuids))
        most = max(need_bytes, before.reserved_bytes)
        reservation.update(before.on(tuple(both), reserved_bytes=most))
        others = self.others()
        limit = self.gpu_limit()
        visible = self.read()
        wanted = before.on(
            uuids, reserved_bytes=need_bytes, only=tuple(gpu.uuid for gpu in visible.gpus)
        )
        is_mine = has_room(wanted, others, visible.machine, limit)
        reservation.update(wanted if is_mine else before)
        return is_mine

    def find_open_gpus(self) -> tuple[GpuInfo, ...]:
        """Return the GPUs that the job could take now. Memory of the job itself counts as free."""
        if self._reservation is None:
            return self.read().gpus
        now = time.monotonic()  # the time of the records, since reading the GPUs may take long
        try:
            others = self.others()
            limit = self.gpu_limit()
        except QueueError as problem:
            self.do_without(problem)
            return self.read().gpus
        visible = self.read()
        me = replace(
            self._reservation.job, reserved_bytes=0, only=tuple(gpu.uuid for gpu in visible.gpus)
        )
        return find_open_gpus(me, others, visible.machine, now, limit)

    def find_job_to_yield_to(self) -> QueuedJob | None:
        """Return the waiting job to which this job should release its GPUs, if any.

        It is a job of a user who holds fewer GPUs, for which GPUs of this job are kept. Like
        `tick`, this must not run in the attempt's own process.
        """
        if self._reservation is None:
            return None
        me = self._reservation.job
        now = time.monotonic()
        with contextlib.suppress(QueueError):
            others = self.others()
            limit = self.gpu_limit()
            # Reading the GPUs costs more, so the records are checked first.
            if any(not other.gpus and other.owner != me.owner for other in others):
                gpus = self.read().machine
                close_session()
                return find_job_to_yield_to(me, others, gpus, now, limit)
        return None

    def take(self, uuids: Sequence[str], need_bytes: int, offered_bytes: int | None = None) -> bool:
        """Reserve the next attempt's GPUs in place of the last attempt's GPUs.

        Args:
            uuids: the GPUs in the order of the ranks. Empty for the CPU, which releases all GPUs.
            need_bytes: memory that the attempt needs on each GPU.
            offered_bytes: free memory of each GPU when the attempt was decided. If the attempt
                moves to other GPUs, this limits the reservation.

        Returns:
            False if another job has taken any of the GPUs.
        """
        if self._reservation is None:
            return True
        before = self._reservation.job
        try:
            if not uuids:
                self._reservation.update(before.on(()))
                self.release()
                return True
            if set(uuids) != set(before.gpus):
                least = need_bytes if offered_bytes is None else min(need_bytes, offered_bytes)
                return self.announce(uuids, least)
            open_bytes = [gpu.free_bytes for gpu in self.find_open_gpus() if gpu.uuid in uuids]
            room = before.reserved_bytes
            if len(open_bytes) == len(uuids):
                room = min(open_bytes)
            if not self.announce(uuids, min(need_bytes, room)):
                self._reservation.update(before.on(uuids))
        except QueueError as problem:
            self.do_without(problem)
        return True

    def exclude(self, uuid: str, reason: str) -> None:
        """Exclude an unhealthy GPU for all jobs of the host, and log whether that succeeded."""
        fate = "failed, and other jobs do not know about it"
        if self._registry and self._registry.exclude(uuid, self._job.run_dir, reason):
            fate = f"is excluded for {EXCLUDED_SECONDS / 60:g} min for all jobs of this host"
        log.warning("%s %s: %s (robust-train doctor)", uuid, fate, reason)

    def report(self, taken_bytes: int, rank: int = 0) -> None:
        """Record how much memory a rank of the attempt has allocated on its GPU."""
        taken = list(self._reservation.job.taken_bytes if self._reservation else ())
        if 0 <= rank < len(taken):
            taken[rank] = taken_bytes
            self._show(taken_bytes=tuple(taken))

    def follow(
        self, held: Sequence[int | None], need_bytes: int, jobs_per_device: int | None = None
    ) -> int | None:
        """Adapt the reservation on the attempt's GPUs to the job's present need.

        The reservation grows as far as the other jobs leave room. It never falls below the memory
        that the processes hold, since that memory is in use anyway. As in `announce`, the record
        is written before the other records are read.

        Args:
            held: bytes that the job's processes hold on each of its GPUs, None if unknown.
            need_bytes: bytes that the job needs on each of its GPUs.
            jobs_per_device: jobs that it accepts on its GPUs from now on, None for no change.

        Returns:
            The bytes that are now reserved on each GPU, or None without a reservation.
        """
        reservation = self._reservation
        if reservation is None or reservation.job.draining:
            return None
        before = reservation.job
        if len(held) != len(before.gpus):
            return None
        pairs = zip(held, before.taken_bytes, strict=True)
        taken = tuple(earlier if new is None else new for new, earlier in pairs)
        least = max((size or 0 for size in taken), default=0)
        wanted = max(need_bytes, least)
        most = jobs_per_device or before.jobs_per_device
        job = replace(before, taken_bytes=taken, reserved_bytes=wanted, jobs_per_device=most)
        with contextlib.suppress(QueueError):
            reservation.update(job)
            if wanted <= before.reserved_bytes:
                return wanted
            others = self.others()
            room = room_on_own_gpus(job, others, self.read().machine)
            if room is not None and room < wanted:
                wanted = max(room, least, min(before.reserved_bytes, wanted))
                reservation.update(replace(job, reserved_bytes=wanted))
        return reservation.job.reserved_bytes

    def drain(self) -> None:
        """Record that the attempt has ended, so its memory will soon be free."""
        if self._reservation is not None:
            gpus = self._reservation.job.gpus
            self._show(draining=True, taken_bytes=(None,) * len(gpus), idle_seconds=())

    def tick(self) -> None:
        """Record once a minute for how long the job's GPUs have been idle.

        This closes the NVML session, so it must not run in the attempt's own process.
        """
        now = time.monotonic()
        if self._reservation is None or now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        uuids = self._reservation.job.gpus
        busy_at = self._busy_at
        # A GPU that does not report its utilisation counts as busy.
        self._busy_at = {
            gpu.uuid: now if gpu.utilization_percent != 0 else busy_at.get(gpu.uuid, now)
            for gpu in self.read().gpus
            if gpu.uuid in uuids
        }
        close_session()
        idle = (int(now - self._busy_at.get(uuid, now)) for uuid in uuids)
        self._show(idle_seconds=tuple(idle))

    def release(self) -> None:
        """Leave the queue. The GPUs stay reserved while processes of an attempt live."""
        if self._reservation is not None:
            self._reservation.release()
        if self._registry is not None:
            self._registry.close()
        self._reservation = self._registry = None

    def _show(self, **changes: Any) -> None:
        """Change the record that other jobs read, if that is possible."""
        if self._reservation is not None:
            job = self._reservation.job
            with contextlib.suppress(QueueError):
                self._reservation.update(replace(job, **changes))

    def do_without(self, problem: QueueError) -> None:
        """Continue without the queue, after a warning."""
        # An f-string, so that the message names keys as the user's project does.
        log.warning(f"{problem}; this job continues without a reservation")
        self._directory = None
        self.release()
