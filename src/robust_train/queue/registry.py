"""Keeps a record of each job of this host in the queue directory. Launchers and commands use it.

A job lives as long as its record is locked. The launcher holds the lock, and so does each process
that inherits the descriptor: the attempt and its children. The kernel releases the lock when the
last of them ends, and the next job of the same user removes the file. A process that has closed the
descriptor is recognised by its job's mark (``host/linux.py``), and keeps the GPUs as well. Another
user cannot keep a record alive: its owner locks the file before it gets its name, and a probe
requests a write lock.

No lock covers several records. A job first writes the GPUs that it takes into its own record, and
then reads all other records (``HostQueue.announce``). So if two jobs take the same GPU at once, at
least one of them sees the other, and no job ever blocks another.
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

# GPUs that have been idle for this long are shown as idle.
IDLE_SECONDS = 3600
# Other jobs overtake a waiting job that has not polled for this long, because it is suspended or
# its driver hangs.
UNSEEN_SECONDS = 5.0

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
    """The record of a living job of this host. Times are of the monotonic clock."""

    # The record's id. It is part of the file's name, which no other user can forge.
    id: str = ""
    # The order in the queue: lower tickets go first. A job keeps its ticket for its whole life.
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
    # UUIDs of its GPUs in the order of its ranks. Empty while it waits. While the job moves to
    # other GPUs, the list contains the old and the new GPUs.
    gpus: tuple[str, ...] = ()
    # Memory that its attempt has allocated at least on each of its GPUs, None if unknown.
    taken_bytes: tuple[int | None, ...] = ()
    draining: bool = False  # whether its attempt has ended, but its memory is not free yet
    queued_at: float = 0.0
    since: float = 0.0  # when it started to wait, to run or to drain
    polled_at: float = 0.0  # when it last tried to get GPUs
    # Seconds for which each of its GPUs has been idle. Empty before the first check.
    idle_seconds: tuple[int, ...] = ()
    urgency: int = 1  # among the jobs of its user: 0 low, 1 normal, 2 high
    pid_namespace: str = ""  # the process namespace of `pid`
    job: str = ""  # the job's id in commands

    @property
    def shown_id(self) -> str:
        """The job's id, or the record's id if an older version wrote the record."""
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
        """Return the record with these GPUs, on which the job has allocated no memory yet."""
        taken = (None,) * len(gpus)
        job = replace(self, gpus=tuple(gpus), taken_bytes=taken, idle_seconds=(), draining=False)
        return replace(job, **changes)

    @property
    def is_here(self) -> bool:
        """Whether this process is in the launcher's process namespace."""
        return self.pid_namespace == own_pid_namespace()

    def lives_on(
        self, marked: Callable[[], Mapping[int, Sequence[int]]] = marked_processes
    ) -> bool:
        """Return whether the job has GPUs and processes of the job still live."""
        return bool(self.gpus and processes_of(self.id, self.owner, marked))

    def is_polling(self, now: float) -> bool:
        """Return whether the job still polls, and so would take GPUs that the plan gives it."""
        return now - self.polled_at < UNSEEN_SECONDS

    def idle(self) -> dict[str, int]:
        """Return for how many seconds its GPUs have been idle, if that is at least an hour."""
        times = zip(self.gpus, self.idle_seconds, strict=False)
        return {uuid: seconds for uuid, seconds in times if seconds >= IDLE_SECONDS}


def encode(job: QueuedJob) -> bytes:
    """Return the content of the job's record: a checksum and a line of JSON, padded to pages.

    A write replaces the content in place. Readers see by the checksum if it is only half written.
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


@functools.lru_cache(maxsize=256)  # most records have not changed since the last poll
def decode(data: bytes, job_id: str, ticket: int, owner: int) -> QueuedJob | None:
    """Return the job in a record's content, or None if the content is damaged or impossible."""
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
    if not is_possible:
        return None
    return replace(job, name=job.name[:_MOST_TEXT], run_dir=job.run_dir[:_MOST_TEXT])


class Registry(QueueDir):
    """Reads the records of this host's jobs, and adds records to them."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self._known: dict[str, QueuedJob] = {}  # the jobs last read, by the names of their records
        # Names of records whose jobs have ended. No later job has the same name.
        self._dead: set[str] = set()

    def jobs(self) -> list[QueuedJob]:
        """Return the living jobs in the order of their tickets, and remove records of dead jobs.

        Raises:
            QueueError: the records cannot be read, so that all reservations are unknown.
        """
        # If the directory was removed, other jobs use a new directory of the same name.
        if os.fstat(self.fd).st_nlink == 0:
            removed = self.fd
            super().__init__(self.base)
            os.close(removed)
        marked = functools.cache(marked_processes)
        with self.convert_errors("read"):
            records = self.matches(_RECORD_FILE, self._dead)
            if self._dead:
                self._dead.intersection_update(os.listdir(self.fd))
            checked = {record[0]: self._check_record(record, marked) for record in records}
            self._known = {name: job for name, job in checked.items() if job is not None}
        return sorted(self._known.values(), key=lambda job: job.order)

    def _check_record(
        self, record: re.Match[str], marked: Callable[[], Mapping[int, Sequence[int]]]
    ) -> QueuedJob | None:
        """Return a record's job if the job lives. Otherwise remove the record, if it is our own."""
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

        Raises:
            QueueError: the file cannot be created or written.
        """
        last = max((job.ticket for job in self.jobs()), default=0)
        # A job that enters again gets a later ticket than before, and so a new record name: other
        # processes ignore the old name, because they have seen that record dead. Several jobs may
        # get the same ticket; `queued_at` then decides their order.
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
    """Return the job in a record. Reads a second time if the owner was writing the record."""
    ticket = int(record[1])
    for _ in range(2):
        with contextlib.suppress(OSError):
            data = os.pread(fd, MOST_BYTES + 1, 0)
            job = decode(data, f"{ticket}-{record[2]}", ticket, owner)
            if job:
                return job
    return None


class Reservation:
    """Holds this job's own record: first its queue position, later its reservation of GPUs.

    Each process with the descriptor ``fd`` open keeps the record alive. ``fd`` is -1 after the
    release.
    """

    def __init__(self, registry: Registry, job: QueuedJob, name: str) -> None:
        self.registry = registry
        self.job = job
        self._name = name
        self.fd = self._create(job)

    def update(self, job: QueuedJob) -> None:
        """Replace the record, under the same ticket.

        Raises:
            QueueError: the record cannot be written. The old record and its lock remain.
        """
        if self.fd < 0:
            return
        # A job that returns to its earlier state after a lost race sets `since` itself.
        if job.state != self.job.state and job.since == self.job.since:
            job = replace(job, since=time.monotonic())
        if os.fstat(self.fd).st_nlink == 0:
            # Someone has removed the file. A running attempt inherited only the old descriptor, so
            # until the next attempt only the launcher keeps the new reservation alive.
            old = self.fd
            self.fd = self._create(job)
            os.close(old)
        elif job != self.job:
            with self.registry.convert_errors("written"):
                write_whole(self.fd, encode(job))
        self.job = job

    def release(self) -> None:
        """Release the reservation, unless processes of the job are still left on its GPUs."""
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
        with registry.convert_errors("written"), registry.create_file(self._name) as fd:
            lock(fd)  # before the file has its name, since another user could lock it first
            write_whole(fd, encode(job))
        return fd
