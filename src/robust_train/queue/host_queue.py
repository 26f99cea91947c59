"""This job among the host's jobs: its queue position, then its reservation.

If the queue directory cannot be used, one warning has the reason, and from then on GPUs are
chosen by free memory alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from robust_train.gpu.nvml_session import close_session
from robust_train.gpu.processes import user_name
from robust_train.gpu.visible import Visible
from robust_train.model.errors import ConfigError
from robust_train.model.gpu import GpuInfo, Group
from robust_train.queue.plan import has_room, open_to, plan, why_waiting
from robust_train.queue.queue_dir import (
    EXCLUDED_SECONDS,
    LIMITS_FILE,
    QueueProblem,
    exclude,
    mark_excluded,
    read_exclusions,
    read_gpu_limit,
)
from robust_train.queue.registry import QueuedJob, Registry, Reservation
from robust_train.queue.waiting import (
    GpuRequest,
    NoGpu,
    PollResult,
    WaitStatus,
    wait_for_gpu,
)

log = logging.getLogger("robust_train")

_LOOK_SECONDS = 60.0
# the first waiting job polls most often, those behind it less; all within UNSEEN_SECONDS
_SHORTEST_PAUSE_SECONDS, _POSITION_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 0.05, 2.0
_LISTING_FACTOR = 10.0  # to read the records takes at most this fraction of the time
_SEEN_SECONDS = 1.0
_SETTLE_SECONDS = 5.0
_UNANSWERED_SECONDS = 1.0


class HostQueue:
    """One job, as it deals with the other jobs of its host."""

    def __init__(
        self,
        directory: Path | None,  # the queue directory; None for no reservations at all
        *,
        name: str,  # of the job, for people
        run_dir: str,
        jobs_per_device: int,  # maximum number of jobs per GPU that it accepts, including itself
        # reads the GPUs; its argument asks for their processes too
        read: Callable[[bool], Visible],
        token: str = "",  # the last part of the job's id, six hexadecimal digits; empty: any
    ) -> None:
        self.job_id: str | None = None
        """As ``robust-train queue`` shows it; None before the job had a ticket."""
        self._directory = directory
        self._job = QueuedJob(
            name=name, run_dir=run_dir, jobs_per_device=jobs_per_device
        )
        self._token = token
        self._read_machine = read
        self._registry: Registry | None = None
        self._reservation: Reservation | None = None
        self._busy_at: dict[str, float] = {}
        self._next_look = 0.0

    @property
    def hold(self) -> int | None:
        """The descriptor that keeps the reservation alive; None if there is none."""
        return None if self._reservation is None else self._reservation.fd

    def wait(
        self,
        request: GpuRequest,
        on_status: Callable[[WaitStatus], None],
        sleep: Callable[[float], None],
    ) -> Group | NoGpu:
        """Wait for GPUs and reserve them; a job that comes back keeps its ticket.

        Raises:
            ConfigError: the job could never start under the administrator's limit.
        """
        try:
            queued = self.join(request)
            return wait_for_gpu(
                request,
                read=self.read,
                on_status=on_status,
                sleep=sleep,
                poll=None if queued is None else queued.poll,
            )
        except QueueProblem as problem:
            self._do_without(problem)
        finally:
            if self._reservation is not None and not self._reservation.job.gpus:
                self._reservation.release()
                self._reservation = None
        return wait_for_gpu(request, read=self.read, on_status=on_status, sleep=sleep)

    def join(self, request: GpuRequest) -> QueuePoll | None:
        """Return the polls that get the job its GPUs; None if there is no queue.

        Raises:
            QueueProblem: the queue directory cannot be used.
            ConfigError: as :meth:`wait`.
        """
        self._busy_at = {}
        registry = self._open()
        if registry is None:
            return None
        self._check_limit(registry, request)
        return QueuePoll(self, registry, request)

    def open_gpus(self) -> tuple[GpuInfo, ...]:
        """Return the GPUs that the job could have now; its own memory counts as free."""
        reservation, registry = self._reservation, self._registry
        if reservation is None or registry is None:
            return self.read().gpus
        try:
            others, limit = self.others(registry), read_gpu_limit(registry.directory)
        except QueueProblem as problem:
            self._do_without(problem)
            return self.read().gpus
        visible = self.read()
        me = replace(
            reservation.job,
            reserved_bytes=0,
            only=tuple(gpu.uuid for gpu in visible.gpus),
        )
        return open_to(
            me, others, visible.machine or visible.gpus, time.monotonic(), limit
        )

    def take(self, uuids: Sequence[str], need_bytes: int) -> bool:
        """Reserve the next attempt's GPUs, in the order of its ranks, in place of the last one's;
        none for the CPU: everything is released. Returns False if another job has one by now."""
        reservation, registry = self._reservation, self._registry
        if reservation is None or registry is None:
            return True
        if not uuids:
            self.release()
            return True
        before = reservation.job
        try:
            if set(uuids) != set(before.gpus):
                return self.announce(registry, uuids, need_bytes)
            here = [gpu.free_bytes for gpu in self.open_gpus() if gpu.uuid in uuids]
            if self._reservation is None:  # the queue cannot be used any more
                return True
            room = min(here) if len(here) == len(uuids) else before.reserved_bytes
            if not self.announce(registry, uuids, min(need_bytes, room)):
                reservation.update(before.on(uuids))
        except QueueProblem as problem:
            self._do_without(problem)
        return True

    def announce(
        self, registry: Registry, uuids: Sequence[str], need_bytes: int
    ) -> bool:
        """Reserve GPUs if they have room: write it down first, then look who else did the same.

        Two jobs that announce the same room at once see each other, and both withdraw. Records are
        read before the GPUs: what a job takes meanwhile counts twice, rather than not at all.

        Raises:
            QueueProblem: the record cannot be written.
        """
        assert self._reservation is not None
        before = self._reservation.job
        wanted = before.on(uuids, need_bytes)
        # a job that moves keeps what it has until it has the other
        both = before.on(
            tuple(dict.fromkeys((*before.gpus, *uuids))),
            max(need_bytes, before.reserved_bytes),
        )
        self._reservation.update(both)
        others, limit = self.others(registry), read_gpu_limit(registry.directory)
        visible = self.read()
        wanted = replace(wanted, only=tuple(gpu.uuid for gpu in visible.gpus))
        if has_room(wanted, others, visible.machine or visible.gpus, limit):
            self._reservation.update(wanted)
            return True
        self._reservation.update(before)
        return False

    def requeue(
        self, registry: Registry, request: GpuRequest, only: tuple[str, ...]
    ) -> QueuedJob:
        """Write down what the job waits for, under its old ticket if it has one."""
        wanted = replace(
            self._job,
            reserved_bytes=request.min_bytes,
            count=request.count,
            only=only,
        )
        if self._reservation is None:
            self._reservation = registry.enter(wanted, self._token)
            self.job_id = self._reservation.job.id
            return self._reservation.job
        job = self._reservation.job.on((), request.min_bytes)
        # without a GPU to take it does not show itself, so that those behind it pass
        polled_at = job.polled_at
        if only and time.monotonic() - polled_at >= _SEEN_SECONDS:
            polled_at = time.monotonic()
        self._reservation.update(
            replace(job, count=request.count, only=only, polled_at=polled_at)
        )
        return self._reservation.job

    def others(self, registry: Registry) -> list[QueuedJob]:
        """Return all living jobs but this one."""
        mine = None if self._reservation is None else self._reservation.job.id
        return [job for job in registry.jobs() if job.id != mine]

    def exclude(self, uuid: str, reason: str) -> None:
        """Exclude a GPU that proved unhealthy for the host's jobs, and log whether it is."""
        fate = "failed, and other jobs do not know of it"
        if self._registry is not None and exclude(
            self._registry.directory, uuid, reason
        ):
            fate = f"is excluded for {EXCLUDED_SECONDS / 60:g} min for all jobs of this host"
        log.warning("%s %s: %s (robust-train doctor)", uuid, fate, reason)

    def report(self, taken_bytes: int, rank: int = 0) -> None:
        """Show the other jobs how much a rank of the attempt has allocated on its GPU."""
        if self._reservation is None:
            return
        job = self._reservation.job
        if 0 <= rank < len(job.gpus):
            taken = (*job.taken_bytes[:rank], taken_bytes, *job.taken_bytes[rank + 1 :])
            self._try_to_update(replace(job, taken_bytes=taken))

    def drain(self) -> None:
        """Show the other jobs that the attempt has ended; its memory will be free soon."""
        if self._reservation is not None:
            job = self._reservation.job
            self._try_to_update(replace(job.on(job.gpus), draining=True))

    def tick(self) -> None:
        """Record now and then for how long the job's GPUs have been idle.

        Not in the attempt's own process, whose NVML session would end with ours.
        """
        now = time.monotonic()
        if self._reservation is None or now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        job, busy_at = self._reservation.job, self._busy_at
        # one that does not report its utilisation counts as busy
        self._busy_at = {
            gpu.uuid: busy_at.get(gpu.uuid, now)
            if gpu.utilization_percent == 0
            else now
            for gpu in self.read().gpus
            if gpu.uuid in job.gpus
        }
        close_session()
        idle = tuple(int(now - self._busy_at.get(uuid, now)) for uuid in job.gpus)
        self._try_to_update(replace(job, idle_seconds=idle))

    def release(self) -> None:
        """Release everything; living processes of an attempt keep its GPUs."""
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            reservation.release()
        registry, self._registry = self._registry, None
        if registry is not None:
            registry.close()

    def read(self, processes: bool = False) -> Visible:
        """Return all GPUs that the job may use, excluded ones marked as unusable."""
        visible = self._read_machine(processes)
        excluded = (
            [] if self._registry is None else read_exclusions(self._registry.directory)
        )
        if not excluded:
            return visible
        return replace(
            visible,
            gpus=mark_excluded(visible.gpus, excluded),
            machine=mark_excluded(visible.machine, excluded),
        )

    def _open(self) -> Registry | None:
        if self._registry is None and self._directory is not None:
            self._registry = Registry(self._directory)
            owner = self._registry.directory.owner
            if owner not in (0, os.geteuid()):
                log.warning(
                    "the queue directory %s belongs to user %s, who could remove other jobs' "
                    "reservations (robust-train doctor shows how to give it to root)",
                    self._directory,
                    user_name(owner),
                )
        return self._registry

    def _check_limit(self, registry: Registry, request: GpuRequest) -> None:
        """Refuse a job that could never start; root may set a limit later, then it waits."""
        limit = read_gpu_limit(registry.directory)
        if self.job_id is None and limit is not None and request.count > limit:
            raise ConfigError(
                f"num_gpus={request.count}: this machine's {LIMITS_FILE} has max_gpus_per_user: "
                f"{limit}; ask for at most num_gpus={limit}"
            )

    def _try_to_update(self, job: QueuedJob) -> None:
        assert self._reservation is not None
        with contextlib.suppress(QueueProblem):
            self._reservation.update(job)

    def _do_without(self, problem: QueueProblem) -> None:
        log.warning("%s; this job goes on without a reservation", problem)
        self._directory = None
        self.release()


class QueuePoll:
    """The polls of one waiting job. The records are read each time; the GPUs, which cost more, only
    if a record has changed, for some seconds after that, and once per check interval."""

    def __init__(
        self, queue: HostQueue, registry: Registry, request: GpuRequest
    ) -> None:
        self._queue = queue
        self._registry = registry
        self._request = request
        self._seen: list[QueuedJob] | None = None
        self._only: tuple[str, ...] = ()
        self._result = PollResult()
        self._settle_until = self._next_read = 0.0

    def poll(self) -> PollResult:
        """Take GPUs if the plan gives this job any, else return why not."""
        started = time.monotonic()
        others = self._queue.others(self._registry)
        cost_seconds = time.monotonic() - started
        seen = [
            replace(job, polled_at=float(job.is_polling(started))) for job in others
        ]
        if seen != self._seen:
            # the memory of a job that has ended comes back a little later
            self._settle_until = started + (
                0.0 if self._seen is None else _SETTLE_SECONDS
            )
            self._seen = seen
            self._next_read = started
        if started >= self._next_read or started < self._settle_until:
            self._next_read = started + self._request.interval_seconds
            self._result = self._decide(others)
        else:
            self._queue.requeue(self._registry, self._request, self._only)
        ahead = self._result.position - 1
        pause = min(
            _SHORTEST_PAUSE_SECONDS + _POSITION_SECONDS * ahead, _LONGEST_PAUSE_SECONDS
        )
        pause = max(pause, _LISTING_FACTOR * cost_seconds) * random.uniform(0.5, 1.0)
        is_settling = started < self._settle_until
        return replace(
            self._result,
            pause_seconds=pause,
            read_again_seconds=0.0 if is_settling else self._next_read - started,
        )

    def _decide(self, others: list[QueuedJob]) -> PollResult:
        visible = self._queue.read()
        usable = (gpu.uuid for gpu in visible.gpus if self._request.allows(gpu))
        self._only = tuple(usable) if visible.answered else ()
        me = self._queue.requeue(self._registry, self._request, self._only)
        gpus = visible.machine or visible.gpus
        limit = read_gpu_limit(self._registry.directory)
        decided = plan([*others, me], gpus, time.monotonic(), limit)
        position = decided.order.index(me) + 1
        if not visible.answered:
            self._next_read = time.monotonic() + _UNANSWERED_SECONDS
            return PollResult(position=position, obstacles=visible.problem or "")
        granted = decided.groups.get(me.id, ())
        if granted:
            uuids = [gpu.uuid for gpu in granted]
            if self._queue.announce(self._registry, uuids, me.reserved_bytes):
                return PollResult(granted, position)
            self._next_read = (
                0.0  # another job announced the same: try again at the next poll
            )
        running = [job for job in others if job.gpus]
        in_the_way = any(set(job.gpus) & set(me.only) for job in running)
        return PollResult(
            position=position,
            obstacles=why_waiting(me, running, gpus, decided),
            strangers_only=decided.order[0] == me and not in_the_way,
        )
