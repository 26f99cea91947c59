"""The jobs of this host: one record file each in the queue directory, alive while it is locked.

The lock belongs to the launcher and to every process that inherits the descriptor, its attempt and
all that this starts. The kernel releases it with the last of them, and what is left is a file that
its owner's next job removes. A lock of another user on a record has no effect: it is taken before
the file gets its name, and to probe it is to ask for a write lock.

No lock covers several records. A job announces what it takes in its own record, then reads all
others again (:meth:`robust_train.queue.host_queue.HostQueue.take`): of two jobs that take the same
GPU at once at least one sees the other. So no process can keep the others from deciding.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from robust_train.files import from_json, parse_json
from robust_train.gpu.processes import started_at
from robust_train.host.locks import is_flocked, is_locked, lock
from robust_train.queue.queue_dir import QueueDir, QueueProblem, open_queue_dir

IDLE_SECONDS = 3600
UNSEEN_SECONDS = 5.0
"""A waiting job that has not polled for so long is passed: it is stopped, or its driver hangs."""

# `job.…` is a record of version 0.2, which is locked by `flock`
_RECORD_FILE = re.compile(r"(record|job)\.(\d{1,15})\.([0-9a-f]{6})", re.ASCII)
_UUID = re.compile(r"[A-Za-z0-9/_-]{1,100}", re.ASCII)
_LAST_TICKET = 10**15 - 1
_MOST_BYTES = 32768
_PAGE_BYTES = 4096
_MOST_TEXT = 300
_MOST_GPUS = 256
_LATEST_SECONDS = 1e10
_CHECKSUM = 9  # eight digits and a space


@dataclass(frozen=True)
class QueuedJob:
    """A living job of this host as its record shows it. Times are of the host's monotonic clock."""

    # from the file's name and owner, which a record cannot make up
    id: str = ""
    ticket: int = (
        0  # orders the queue, lower goes first; kept for the whole life of the job
    )
    owner: int = 0  # user id
    name: str = ""
    run_dir: str = ""
    pid: int = 0  # of its launcher
    started: float = 0.0  # when that process started, seconds since boot
    reserved_bytes: int = 0  # memory that it needs on each of its `count` GPUs
    count: int = 1
    jobs_per_device: int = (
        1  # maximum number of jobs per GPU that it accepts, including itself
    )
    # UUIDs of the GPUs that it may use; none while its driver does not answer
    only: tuple[str, ...] = ()
    # UUIDs of its GPUs in the order of its ranks, none while it waits; more than `count` for the
    # moment in which it moves
    gpus: tuple[str, ...] = ()
    # least that its attempt has allocated on each of them; None if unknown
    taken_bytes: tuple[int | None, ...] = ()
    draining: bool = False  # its attempt has ended, and the memory is not back yet
    queued_at: float = 0.0
    since: float = 0.0  # when it began to wait, to run or to drain
    polled_at: float = 0.0  # when it last tried to get GPUs
    # for how many seconds each of its GPUs has been idle, as last seen; none if never
    idle_seconds: tuple[int, ...] = ()

    @property
    def state(self) -> str:
        """``waiting``, ``running`` or ``draining``."""
        if not self.gpus:
            return "waiting"
        return "draining" if self.draining else "running"

    @property
    def order(self) -> tuple[int, float, str]:
        """First come, first served; lower goes first."""
        return self.ticket, self.queued_at, self.id

    def on(self, gpus: Sequence[str], reserved_bytes: int | None = None) -> QueuedJob:
        """Return the job with these GPUs, on which it has taken nothing yet."""
        return replace(
            self,
            gpus=tuple(gpus),
            taken_bytes=(None,) * len(gpus),
            idle_seconds=(),
            draining=False,
            reserved_bytes=self.reserved_bytes
            if reserved_bytes is None
            else reserved_bytes,
        )

    def is_polling(self, now: float) -> bool:
        """Return whether it would take GPUs if it got some."""
        return now - self.polled_at < UNSEEN_SECONDS

    def idle(self) -> dict[str, int]:
        """Return for how many seconds GPUs of it have been idle, for those over an hour."""
        times = zip(self.gpus, self.idle_seconds, strict=False)
        return {uuid: seconds for uuid, seconds in times if seconds >= IDLE_SECONDS}


def encode(job: QueuedJob) -> bytes:
    """Return the content of the job's record: a checksum and a line of JSON, padded to pages.

    A write replaces it in place; the checksum shows who reads meanwhile that it is half written.
    """
    values = asdict(job)
    for key in ("id", "ticket", "owner"):
        del values[key]
    for key in ("name", "run_dir"):
        values[key] = values[key][:_MOST_TEXT]
    line = json.dumps(values, separators=(",", ":")).encode()
    content = f"{zlib.crc32(line):08x} ".encode() + line
    pages = -(-(len(content) + 1) // _PAGE_BYTES)
    return content.ljust(pages * _PAGE_BYTES - 1) + b"\n"


@functools.lru_cache(maxsize=256)  # most records are the same at the next poll
def decode(data: bytes, job_id: str, ticket: int, owner: int) -> QueuedJob | None:
    """Return the job in a record's content; None for anything else."""
    line = data[_CHECKSUM:].rstrip()
    try:
        if len(data) > _MOST_BYTES or int(data[: _CHECKSUM - 1], 16) != zlib.crc32(
            line
        ):
            return None
        values = parse_json(line)
        values = {**values, "id": job_id, "ticket": ticket, "owner": owner}
        if "state" in values:  # version 0.2
            values["draining"] = values["state"] == "draining"
        job = from_json(QueuedJob, values)
    except (ValueError, TypeError, OverflowError):
        return None
    is_possible = (
        0 <= job.pid < 2**31
        and 0 <= job.reserved_bytes <= 2**50
        and 1 <= job.count <= _MOST_GPUS
        and 1 <= job.jobs_per_device <= 2**20
        and all(
            0 <= at < _LATEST_SECONDS for at in (job.started, job.queued_at, job.since)
        )
        and all(0 <= (size or 0) <= 2**50 for size in job.taken_bytes)
        and all(0 <= seconds < _LATEST_SECONDS for seconds in job.idle_seconds)
        and max(len(job.only), len(job.gpus)) <= _MOST_GPUS
        and all(_UUID.fullmatch(uuid) for uuid in (*job.only, *job.gpus))
        and len(job.gpus) == len(set(job.gpus)) == len(job.taken_bytes)
    )
    if not is_possible:
        return None
    return replace(job, name=job.name[:_MOST_TEXT], run_dir=job.run_dir[:_MOST_TEXT])


class Registry:
    """The jobs of this host, as one process sees them.

    Raises:
        QueueProblem: the directory cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.directory: QueueDir = open_queue_dir(path)
        self.left_out: dict[int, int] = {}
        """Record files that were not read for their number, by user id."""
        self._known: dict[str, QueuedJob | None] = {}

    def close(self) -> None:
        """Close the directory."""
        self.directory.close()

    def jobs(self) -> list[QueuedJob]:
        """Return the living jobs in the order of their tickets; remove what own dead ones left."""
        if (
            os.fstat(self.directory.fd).st_nlink == 0
        ):  # removed: newcomers see another one
            found = open_queue_dir(self._path)
            self.directory.close()
            self.directory = found
        matches, self.left_out = self.directory.matches(_RECORD_FILE)
        known, self._known = self._known, {}
        for match in matches:
            fd = self.directory.open(match[0])
            if fd is None:
                continue
            try:
                owner = os.fstat(fd).st_uid
                if is_locked(fd) or (match[1] == "job" and is_flocked(fd)):
                    self._known[match[0]] = _read(fd, match, owner) or known.get(
                        match[0]
                    )
                elif os.geteuid() in (0, owner):
                    self.directory.remove(match[0])
            finally:
                os.close(fd)
        return sorted(filter(None, self._known.values()), key=lambda job: job.order)

    def enter(self, job: QueuedJob, token: str = "") -> Reservation:
        """Queue a job behind all living ones; ``token``: the last part of its id.

        Raises:
            QueueProblem: the file cannot be made or written.
        """
        last = max((one.ticket for one in self.jobs()), default=0)
        # several jobs may get the same ticket: the time at which they came orders them
        ticket = min(1 + last, _LAST_TICKET)
        token = token or os.urandom(3).hex()
        now = time.monotonic()
        entered = replace(
            job,
            id=f"{ticket}-{token}",
            ticket=ticket,
            owner=os.geteuid(),
            pid=os.getpid(),
            started=started_at(os.getpid()) or 0.0,
            queued_at=now,
            since=now,
            polled_at=now,
        )
        return Reservation(self, entered, f"record.{ticket:010}.{token}")


def _read(fd: int, match: re.Match[str], owner: int) -> QueuedJob | None:
    """Return the job in a record; read it once more if its owner writes it just now."""
    for _ in range(2):
        with contextlib.suppress(OSError):
            data = os.pread(fd, _MOST_BYTES + 1, 0)
            job = decode(data, f"{int(match[2])}-{match[3]}", int(match[2]), owner)
            if job is not None:
                return job
    return None


@contextlib.contextmanager
def existing_registry(path: Path) -> Iterator[Registry | None]:
    """Open the jobs of the queue directory at ``path``; None if it cannot be used."""
    registry = None
    with contextlib.suppress(QueueProblem):
        registry = Registry(path) if os.path.exists(path) else None
    try:
        yield registry
    finally:
        if registry is not None:
            registry.close()


class Reservation:
    """This job's own record: its queue position, and later its reservation on its GPUs.

    Whoever has its descriptor ``fd`` open keeps it alive; -1 once released.
    """

    def __init__(self, registry: Registry, job: QueuedJob, name: str) -> None:
        self._registry = registry
        self._name = name
        self.job = job
        self.fd = self._create(job)

    def update(self, job: QueuedJob) -> None:
        """Replace the record, under the same ticket.

        Raises:
            QueueProblem: it cannot be written; the old record and its lock still stand.
        """
        if self.fd < 0:
            return
        if job.state != self.job.state:
            job = replace(job, since=time.monotonic())
        if os.fstat(self.fd).st_nlink == 0:
            # someone has removed it. An attempt that runs has the old descriptor alone, so only
            # the launcher keeps this reservation until the next attempt
            old, self.fd = self.fd, self._create(job)
            os.close(old)
        elif job != self.job:
            self._write(self.fd, job)
        self.job = job

    def release(self) -> None:
        """Release the reservation. What still has the descriptor open keeps it all the same."""
        if self.fd < 0:
            return
        fd, self.fd = self.fd, -1
        os.close(fd)
        # while a process of ours has it open, others must see it
        again = self._registry.directory.open(self._name)
        if again is not None:
            if not is_locked(again):
                self._registry.directory.remove(self._name)
            os.close(again)

    def _create(self, job: QueuedJob) -> int:
        directory = self._registry.directory
        # private until it is locked: another user's lock could come first
        temporary = f"new.{os.urandom(8).hex()}"
        try:
            fd = directory.create(temporary, 0o600)
        except OSError as error:
            raise directory.problem(error) from error
        try:
            lock(fd)
            self._write(fd, job)
            os.fchmod(fd, 0o644)
            os.rename(
                temporary, self._name, src_dir_fd=directory.fd, dst_dir_fd=directory.fd
            )
        except BaseException as error:
            directory.remove(temporary)
            os.close(fd)
            if isinstance(error, OSError):
                raise directory.problem(error) from error
            raise
        return fd

    def _write(self, fd: int, job: QueuedJob) -> None:
        data = encode(job)
        try:
            written = os.pwrite(fd, data, 0)
            if written != len(data):
                raise OSError(28, "No space left on device")
            if os.fstat(fd).st_size != len(data):
                os.ftruncate(fd, len(data))
        except OSError as error:
            raise self._registry.directory.problem(error) from error
