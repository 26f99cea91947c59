"""This job among the host's jobs: its queue position, then its reservation.

If the queue directory cannot be used, one warning has the reason, and from then on GPUs are
chosen by free memory alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from robust_train.errors import ConfigError
from robust_train.gpu.nvml_session import close_session
from robust_train.gpu.processes import user_name
from robust_train.gpu.visible import Visible
from robust_train.queue.exclusions import SECONDS, exclude, mark_excluded, read_exclusions
from robust_train.queue.queue_dir import QueueProblem
from robust_train.queue.queue_rules import NAME, read_rules
from robust_train.queue.queued_job import QueuedJob, as_waiting, split
from robust_train.queue.records import JobRecord, JobState
from robust_train.queue.reservations import (
    CHARGE_SECONDS,
    JobRegistry,
    RegistryBusy,
    Reservation,
    boottime,
    new_record,
)
from robust_train.queue.scheduler import open_to
from robust_train.queue.waiting import GpuRequest, NoGpu, WaitStatus, wait_for_gpu
from robust_train.values import GpuInfo, Group

log = logging.getLogger("robust_train")

_REPORT_SECONDS = 1.0
_LOOK_SECONDS = 60.0


class Sleep(Protocol):
    """Waits some seconds, but not past the moment when ``wake`` becomes readable."""

    def __call__(self, seconds: float, wake: int | None = None) -> None: ...


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
        self._name = name
        self._run_dir = run_dir
        self._jobs_per_device = jobs_per_device
        self._token = token
        self._read_machine = read
        self._registry: JobRegistry | None = None
        self._reservation: Reservation | None = None
        self._busy_at: dict[str, float] = {}
        self._next_look = self._next_charge = 0.0

    @property
    def hold(self) -> int | None:
        """The descriptor that keeps the reservation alive; None if there is none."""
        return None if self._reservation is None else self._reservation.fd

    def wait(
        self, request: GpuRequest, on_status: Callable[[WaitStatus], None], sleep: Sleep
    ) -> Group | NoGpu:
        """Wait for GPUs and reserve them; a job that comes back keeps its ticket."""
        before, self._reservation = self._reservation, None
        self._busy_at = {}  # GPUs are others' until they are this job's again
        try:
            registry = self._open()
            if registry is not None:
                return self._wait_in_queue(registry, before, request, on_status, sleep)
        except QueueProblem as problem:
            self._do_without(problem)
        return wait_for_gpu(request, read=self.read, on_status=on_status, sleep=sleep)

    def open_gpus(self) -> tuple[GpuInfo, ...]:
        """Return the GPUs that the job could have now, its own alone if the queue is locked."""
        if self._reservation is not None and self._registry is not None:
            try:
                with self._deciding(self._registry) as visible:
                    return self._open_gpus(self._registry, self._reservation, visible, 0)
            except RegistryBusy:
                mine = self._reservation.record.gpus
                return tuple(gpu for gpu in self.read().gpus if gpu.uuid in mine)
            except QueueProblem as problem:
                self._do_without(problem)
        return self.read().gpus

    def take(self, uuids: Sequence[str], need_bytes: int) -> bool:
        """Reserve the next attempt's GPUs, in the order of its ranks, in place of the last one's;
        none for the CPU: everything is released. Returns False if another job has one by now."""
        reservation, registry = self._reservation, self._registry
        if reservation is None or registry is None:
            return True
        if not uuids:
            self.release()
            return True
        stays = set(uuids) == set(reservation.record.gpus)
        try:
            with self._deciding(registry) as visible:
                here = self._open_gpus(registry, reservation, visible, 0 if stays else need_bytes)
                free = {gpu.uuid: gpu.free_bytes for gpu in here if gpu.uuid in uuids}
                if stays:  # as far as the others leave it
                    room = reservation.record.reserved_bytes
                    if len(free) == len(uuids):
                        room = min(free.values())
                    need_bytes = min(need_bytes, room)
                elif len(free) < len(uuids):
                    return False
                reservation.update(reservation.record.on(uuids, need_bytes))
        except RegistryBusy:
            return stays
        except QueueProblem as problem:
            self._do_without(problem)
        return True

    def exclude(self, uuid: str, reason: str) -> None:
        """Exclude a GPU that proved unhealthy for the host's jobs, and log whether it is."""
        fate = "failed, and other jobs do not know of it"
        if self._registry is not None and exclude(self._registry.directory, uuid, reason):
            fate = f"is excluded for {SECONDS / 60:g} min for all jobs of this host"
        log.warning("%s %s: %s (robust-train doctor)", uuid, fate, reason)

    def report(self, taken_bytes: int, rank: int = 0) -> None:
        """Show the other jobs how much a rank of the attempt has allocated on its GPU."""
        if self._reservation is None:
            return
        record = self._reservation.record
        if 0 <= rank < len(record.gpus):
            taken = (*record.taken_bytes[:rank], taken_bytes, *record.taken_bytes[rank + 1 :])
            if taken != record.taken_bytes:  # each write wakes all who wait
                self._try_to_update(replace(record, taken_bytes=taken))

    def drain(self) -> None:
        """Show the other jobs that the attempt has ended; its memory will be free soon."""
        if self._reservation is not None:
            record = self._reservation.record
            self._try_to_update(record.on(record.gpus, state=JobState.DRAINING))

    def tick(self) -> None:
        """Record now and then what an attempt has used, and when its GPUs were busy.

        Not in the attempt's own process, whose NVML session would end with ours.
        """
        if self._reservation is None:
            return
        now, record, busy_at = boottime(), self._reservation.record, self._busy_at
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            # one that does not report its utilisation counts as busy
            self._busy_at = {
                gpu.uuid: busy_at.get(gpu.uuid, now) if gpu.utilization_percent == 0 else now
                for gpu in self.read().gpus
                if gpu.uuid in record.gpus
            }
            close_session()
        if now >= self._next_charge:
            self._next_charge = now + CHARGE_SECONDS
            seen = tuple(self._busy_at.get(uuid, now) for uuid in record.gpus)
            self._try_to_update(replace(record, busy_at=seen))

    def release(self) -> None:
        """Release everything; living processes of an attempt keep its GPUs."""
        if self._reservation is not None:
            self._try_to_update(self._reservation.record)  # charges the user
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            reservation.release()
        registry, self._registry = self._registry, None
        if registry is not None:
            registry.close()

    def _open(self) -> JobRegistry | None:
        if self._registry is None and self._directory is not None:
            self._registry = JobRegistry(self._directory)
            owner = self._registry.directory.owner
            if owner not in (0, os.geteuid()):
                log.warning(
                    "the queue directory %s belongs to user %s, who could remove other jobs' "
                    "reservations (robust-train doctor shows how to give it to root)",
                    self._directory,
                    user_name(owner),
                )
        return self._registry

    def _wait_in_queue(
        self,
        registry: JobRegistry,
        before: Reservation | None,
        request: GpuRequest,
        on_status: Callable[[WaitStatus], None],
        sleep: Sleep,
    ) -> Group | NoGpu:
        about = self._name, self._run_dir, request.min_bytes, self._jobs_per_device
        record = new_record(*about, request.count, self._token)
        most = read_rules(registry.directory, ()).max_gpus_per_user
        # root may set it later: a job that has begun waits then
        if self.job_id is None and most is not None and request.count > most:
            raise ConfigError(
                f"num_gpus={request.count}: this machine's {NAME} has max_gpus_per_user: {most}; "
                f"ask for at most num_gpus={most}"
            )
        queued = QueuedJob(registry, record, before)

        def note(status: WaitStatus) -> None:
            if queued.reservation is not None:
                self.job_id = queued.reservation.record.id
            on_status(status)

        try:
            return wait_for_gpu(
                request,
                read=self.read,
                on_status=note,
                sleep=lambda seconds: sleep(seconds, queued.fd),
                queued=queued,
            )
        finally:
            queued.leave()
            if queued.reservation is not None:
                self._reservation = queued.reservation
                self.job_id = queued.reservation.record.id

    @contextlib.contextmanager
    def _deciding(self, registry: JobRegistry) -> Iterator[Visible]:
        """Hold the queue lock, with fresh figures of the GPUs."""
        self.read()  # a driver that hangs does so before the lock is taken
        with registry.locked():
            yield self.read()

    def _open_gpus(
        self,
        registry: JobRegistry,
        reservation: Reservation,
        visible: Visible,
        need_bytes: int,
    ) -> tuple[GpuInfo, ...]:
        record = reservation.record
        jobs = registry.jobs(sweep=True)
        waiting, reservations = split(jobs, without=record.id)
        rules = read_rules(registry.directory, jobs)
        usable = frozenset(gpu.uuid for gpu in visible.gpus)
        me = replace(as_waiting(record, os.geteuid()), need_bytes=need_bytes, only=usable)
        gpus, now = visible.machine or visible.gpus, boottime()
        found = open_to(me, waiting, reservations, gpus, now, rules)
        readable = [other for other in reservations if other.gpu is not None]
        if len(readable) < len(reservations):  # shuts all GPUs but those that are ours already
            mine = replace(me, only=usable & set(record.gpus))
            found += open_to(mine, waiting, readable, gpus, now, rules)
        return found

    def _try_to_update(self, record: JobRecord) -> None:
        """Update the record, unless others decide just now or it cannot be written."""
        assert self._reservation is not None
        assert self._registry is not None
        unless = contextlib.suppress(RegistryBusy, QueueProblem)
        with unless, self._registry.locked(_REPORT_SECONDS):
            self._reservation.update(record)

    def read(self, processes: bool = False) -> Visible:
        """Return all GPUs that the job may use, excluded ones marked as unusable."""
        visible = self._read_machine(processes)
        excluded = [] if self._registry is None else read_exclusions(self._registry.directory)
        if not excluded:
            return visible
        return replace(
            visible,
            gpus=mark_excluded(visible.gpus, excluded),
            machine=mark_excluded(visible.machine, excluded),
        )

    def _do_without(self, problem: QueueProblem) -> None:
        log.warning("%s; this job goes on without a reservation", problem)
        self._directory = None
        self.release()
