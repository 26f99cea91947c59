"""The jobs of this host. Each has a record file in the queue directory, and lives while that is
locked. Launchers and the commands that show the queue use it.

The lock belongs to the launcher and to every process that inherits the descriptor: its attempt and
all children of the attempt. The kernel releases it with the last of them. The file that is left is
removed by the next job of its owner. A process that has closed the descriptor is known by its job's
mark (`host/linux.py`): while it lives, the job keeps its GPUs. A lock of another user on a record
has no effect: the owner locks the file before it gets its name, and a probe asks for a write lock.

No lock covers several records. A job announces what it takes in its own record, then reads all
others again (``HostQueue.announce``): if two jobs take the same GPU at once, at least one sees the
other. So no process can keep the others from deciding.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from robust_train.files import open_regular, parse_json
from robust_train.gpu.processes import own_pid_namespace, started_at
from robust_train.host.linux import is_locked, lock, marked_processes, processes_of
from robust_train.model.json import from_json
from robust_train.queue.queue_dir import MOST_BYTES, QueueDir, write_whole

IDLE_SECONDS = 3600
UNSEEN_SECONDS = 5.0
"""A waiting job that has not polled for this long is passed: it is stopped, or its driver hangs."""

_RECORD_FILE = re.compile(r"record\.(\d{1,15})\.([0-9a-f]{6})", re.ASCII)
_UUID = re.compile(r"[A-Za-z0-9/_-]{1,100}", re.ASCII)
_JOB = re.compile(r"[0-9a-f]{0,32}", re.ASCII)
_LAST_TICKET = 10**15 - 1
# This process or the machine cannot open any file.
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_PAGE_BYTES = 4096
_MOST_TEXT = 300
_MOST_GPUS = 256
_LARGEST = 2**53
_CHECKSUM = 9  # eight digits and a space


@dataclass(frozen=True)
class QueuedJob:
    """A living job of this host, as its record shows it. Times are of the monotonic clock."""

    # The record's id, from the file's name, which no other user can make up.
    id: str = ""
    # The order in the queue: lower goes first. A job keeps it for its whole life.
    ticket: int = 0
    owner: int = 0  # user id
    name: str = ""
    run_dir: str = ""
    pid: int = 0  # the launcher's process
    started: float = 0.0  # when that process started, seconds since boot
    reserved_bytes: int = 0  # memory that it needs on each of its `count` GPUs
    count: int = 1
    # The maximum number of jobs per GPU that it accepts, including itself.
    jobs_per_device: int = 1
    # UUIDs of the GPUs that it may use. Empty while its driver does not answer.
    only: tuple[str, ...] = ()
    # UUIDs of its GPUs in the order of its ranks. Empty while it waits, more than `count` for the
    # moment in which it moves.
    gpus: tuple[str, ...] = ()
    # Memory that its attempt has allocated on each of them, at least. None if unknown.
    taken_bytes: tuple[int | None, ...] = ()
    # Its attempt has ended, and the memory is not back yet.
    draining: bool = False
    queued_at: float = 0.0
    since: float = 0.0  # when it began to wait, to run or to drain
    polled_at: float = 0.0  # when it last tried to get GPUs
    # Seconds for which each of its GPUs has been idle, as last seen. Empty if never seen.
    idle_seconds: tuple[int, ...] = ()
    urgency: int = 1  # among the jobs of its user: 0 low, 1 normal, 2 high
    pid_namespace: str = ""  # the namespace in which `pid` is the launcher
    job: str = ""  # the job's id, as commands know it

    @property
    def shown_id(self) -> str:
        """The job's id, or the id of its record if an older version wrote that."""
        return self.job or self.id

    @property
    def state(self) -> str:
        """``waiting``, ``running`` or ``draining``."""
        if not self.gpus:
            return "waiting"
        return "draining" if self.draining else "running"

    @property
    def order(self) -> tuple[int, float, str]:
        """The sorting key of the queue: first come, first served."""
        return self.ticket, self.queued_at, self.id

    def on(self, gpus: Sequence[str], **changes: Any) -> QueuedJob:
        """Return the job with these GPUs, on which it has taken nothing yet."""
        candidate = replace(
            self, gpus=tuple(gpus), taken_bytes=(None,) * len(gpus), idle_seconds=(), draining=False
        )
        return replace(candidate, **changes)

    @property
    def is_here(self) -> bool:
        """Whether this process is in the launcher's process namespace."""
        return self.pid_namespace == own_pid_namespace()

    def lives_on(
        self, marked: Callable[[], Mapping[int, Sequence[int]]] = marked_processes
    ) -> bool:
        """Return whether processes of the job are left on its GPUs."""
        return bool(self.gpus and processes_of(self.id, self.owner, marked))

    def is_polling(self, now: float) -> bool:
        """Return whether the job would take GPUs that it is given."""
        return now - self.polled_at < UNSEEN_SECONDS

    def idle(self) -> dict[str, int]:
        """Return the seconds for which its GPUs have been idle, if that is over an hour."""
        times = zip(self.gpus, self.idle_seconds, strict=False)
        return {uuid: seconds for uuid, seconds in times if seconds >= IDLE_SECONDS}


def encode(job: QueuedJob) -> bytes:
    """Return the content of the job's record: a checksum and a line of JSON, padded to pages.

    A write replaces it in place. The checksum shows to readers whether it is half written.
    """
    values = asdict(job)
    for key in ("id", "ticket", "owner"):
        del values[key]
    for key in ("name", "run_dir"):
        values[key] = values[key][:_MOST_TEXT]
    line = json.dumps(values, separators=(",", ":")).encode()
    content = b"%08x %s" % (zlib.crc32(line), line)
    pages = len(content) // _PAGE_BYTES + 1
    return content.ljust(pages * _PAGE_BYTES - 1) + b"\n"


@functools.lru_cache(maxsize=256)  # most records are the same at the next poll
def decode(data: bytes, job_id: str, ticket: int, owner: int) -> QueuedJob | None:
    """Return the job in a record's content, or None if the content is anything else."""
    line = data[_CHECKSUM:].rstrip()
    try:
        checksum = int(data[: _CHECKSUM - 1], 16)
        if len(data) > MOST_BYTES or checksum != zlib.crc32(line):
            return None
        identity = {"id": job_id, "ticket": ticket, "owner": owner}
        job = from_json(QueuedJob, {**parse_json(line), **identity})
    except (ValueError, TypeError, OverflowError):
        return None
    figures = itertools.chain(vars(job).values(), job.taken_bytes, job.idle_seconds)
    is_possible = (
        all(0 <= figure <= _LARGEST for figure in figures if isinstance(figure, (int, float)))
        and min(job.count, job.jobs_per_device) >= 1
        and _JOB.fullmatch(job.job) is not None
        and job.pid < 2**31
        and max(job.count, len(job.only), len(job.gpus)) <= _MOST_GPUS
        and all(_UUID.fullmatch(uuid) for uuid in job.only + job.gpus)
        and len(job.gpus) == len(set(job.gpus)) == len(job.taken_bytes)
    )
    name = job.name[:_MOST_TEXT]
    run_dir = job.run_dir[:_MOST_TEXT]
    return replace(job, name=name, run_dir=run_dir) if is_possible else None


class Registry(QueueDir):
    """The queue directory with the jobs of this host, as one process sees them."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self._known: dict[str, QueuedJob] = {}  # jobs by the name of their record, as last read
        self._dead: set[str] = set()
        """Names of records whose jobs have ended. Such a job never comes to life again."""

    def jobs(self) -> list[QueuedJob]:
        """Return the living jobs in the order of their tickets, and remove records of dead jobs.

        Raises:
            QueueError: the records cannot be read, so that all reservations are unknown.
        """
        # The directory was removed, so newcomers see a new directory.
        if os.fstat(self.fd).st_nlink == 0:
            removed = self.fd
            super().__init__(self.base)
            os.close(removed)
        marked = functools.cache(marked_processes)
        with self.problems("read"):
            records = self.matches(_RECORD_FILE, self._dead)
            if self._dead:
                self._dead.intersection_update(os.listdir(self.fd))
            looked_at = {record[0]: self._look_at(record, marked) for record in records}
            self._known = {name: job for name, job in looked_at.items() if job is not None}
        return sorted(self._known.values(), key=lambda job: job.order)

    def _look_at(
        self, record: re.Match[str], marked: Callable[[], Mapping[int, Sequence[int]]]
    ) -> QueuedJob | None:
        """Return a record's job if it lives. Else remove the record, if it is this user's."""
        name = record[0]
        try:
            fd = open_regular(name, self.fd)
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:
                raise
            return None
        try:
            owner = os.fstat(fd).st_uid
            job = _read(fd, record, owner)
            if job is None:
                job = self._known.get(name)
            if is_locked(fd) or (job is not None and job.lives_on(marked)):
                return job
            self._dead.add(name)
            if os.geteuid() in (0, owner):
                self.remove(name)
            return None
        finally:
            os.close(fd)

    def enter(self, job: QueuedJob, token: str = "") -> Reservation:
        """Queue a job behind all living jobs, with ``token`` as the last part of its id.

        A job that comes back has its earlier ticket, and gets a later ticket.

        Raises:
            QueueError: the file cannot be created or written.
        """
        # Its old record may be known as dead, and a name never comes to life again.
        last = max((job.ticket for job in self.jobs()), default=0)
        # Several jobs may get the same ticket. The time at which they came orders them.
        ticket = min(1 + max(last, job.ticket), _LAST_TICKET)
        if not token:
            token = os.urandom(3).hex()
        now = time.monotonic()
        entered = replace(
            job,
            id=f"{ticket}-{token}",
            ticket=ticket,
            owner=os.geteuid(),
            pid=os.getpid(),
            started=started_at(os.getpid()),
            pid_namespace=own_pid_namespace(),
            queued_at=now,
            since=now,
            polled_at=now,
        )
        return Reservation(self, entered, f"record.{ticket:010}.{token}")


def _read(fd: int, record: re.Match[str], owner: int) -> QueuedJob | None:
    """Return the job in a record. Reads again if its owner is writing it."""
    ticket = int(record[1])
    for _ in range(2):
        with contextlib.suppress(OSError):
            data = os.pread(fd, MOST_BYTES + 1, 0)
            job = decode(data, f"{ticket}-{record[2]}", ticket, owner)
            if job:
                return job
    return None


class Reservation:
    """This job's record: its queue position, and later its reservation on its GPUs.

    Every process that has its descriptor ``fd`` open keeps it alive. -1 once released.
    """

    def __init__(self, registry: Registry, job: QueuedJob, name: str) -> None:
        self.registry = registry
        self.job = job
        self._name = name
        self.fd = self._create(job)

    def update(self, job: QueuedJob) -> None:
        """Replace the record, under the same ticket.

        Raises:
            QueueError: it cannot be written. The old record and its lock remain.
        """
        if self.fd < 0:
            return
        # A job that goes back after a lost race keeps its own time.
        if job.state != self.job.state and job.since == self.job.since:
            job = replace(job, since=time.monotonic())
        if os.fstat(self.fd).st_nlink == 0:
            # Someone has removed it. A running attempt has only the old descriptor, so the
            # launcher alone keeps this reservation until the next attempt.
            old = self.fd
            self.fd = self._create(job)
            os.close(old)
        elif job != self.job:
            with self.registry.problems("written"):
                write_whole(self.fd, encode(job))
        self.job = job

    def release(self) -> None:
        """Release the reservation. Processes of the job that are left on its GPUs still keep it."""
        if self.fd < 0:
            return
        fd = self.fd
        self.fd = -1
        os.close(fd)
        with contextlib.suppress(OSError):
            again = open_regular(self._name, self.registry.fd)
            if not is_locked(again) and not self.job.lives_on():
                self.registry.remove(self._name)
            os.close(again)

    def _create(self, job: QueuedJob) -> int:
        registry = self.registry
        with registry.problems("written"), registry.creating(self._name) as fd:
            lock(fd)  # while it is private: another user's lock could come first
            write_whole(fd, encode(job))
        return fd
