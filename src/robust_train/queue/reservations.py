"""Jobs' reservations: one record file per job, alive as long as its lock is held.

The lock is a ``flock``: it belongs to whoever has the descriptor open, the launcher and the process
tree of its attempt. The kernel releases it with the last of them, and what is left is a file that
anybody may remove. The queue lock is a ``flock`` on the directory itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from robust_train.gpu.bounded import stops_blocked
from robust_train.gpu.processes import started_at, user_name
from robust_train.queue.queue_dir import (
    QueueDir,
    QueueProblem,
    open_queue_dir,
    problem_with,
    read_small,
    why_not_written,
)
from robust_train.queue.records import (
    LAST_TICKET,
    LIMIT_BYTES,
    JobRecord,
    JobState,
    decode,
    encode,
)
from robust_train.queue.usage import add_usage

PREFIX = "job."
CHARGE_SECONDS = 600.0
"""A running job adds its GPU time to its user's this often."""
_JOB_FILE = re.compile(r"job\.(\d{1,15})\.([0-9a-f]{6})", re.ASCII)
_LOCK_SECONDS = 10.0
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.0005, 0.02
# waits until nobody holds the lock of the descriptor that it is given
_KEEPER = "import fcntl, sys; fcntl.flock(int(sys.argv[1]), fcntl.LOCK_SH)"


class RegistryBusy(Exception):
    """Another process holds the queue lock for too long."""


@dataclass(frozen=True)
class LiveJob:
    """A job of this host that is alive."""

    name: str  # of its record file
    ticket: int
    id: str
    owner: int  # the file's user, which unlike the record cannot be made up
    record: JobRecord | None  # None if it cannot be read, so that the job may have any GPU


class JobRegistry:
    """The jobs of this host, as one process sees and changes them.

    Raises:
        QueueProblem: the directory cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.directory: QueueDir = open_queue_dir(path)

    def close(self) -> None:
        """Close the directory, which also releases the queue lock."""
        self.directory.close()

    @contextlib.contextmanager
    def locked(self, timeout_seconds: float = _LOCK_SECONDS) -> Iterator[None]:
        """Hold the queue lock: no other job decides within this block.

        Raises:
            RegistryBusy: another process held the lock all the time.
            QueueProblem: the directory is gone and cannot be made again.
        """
        # Ctrl-Z takes effect after the block, or no job of the host could decide any more
        with stops_blocked():
            self._lock(timeout_seconds)
            try:
                yield
            finally:
                fcntl.flock(self.directory.fd, fcntl.LOCK_UN)

    def _lock(self, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                _take_lock(self.directory.fd, deadline)
            except BlockingIOError:
                raise RegistryBusy(
                    f"another process holds the lock of {self.directory.path} for more than "
                    f"{timeout_seconds:g} s (robust-train doctor names it)"
                ) from None
            if self.directory.exists_still():
                return
            # it was removed: newcomers see another one. If that cannot be made, this stays open
            try:
                found = open_queue_dir(self._path)
            except QueueProblem:
                fcntl.flock(self.directory.fd, fcntl.LOCK_UN)
                raise
            self.directory.close()
            self.directory = found

    def jobs(self, *, sweep: bool = False) -> list[LiveJob]:
        """Return the living jobs, in the order of their tickets. ``sweep``: remove what dead ones
        left; only under the queue lock."""
        by_inode: dict[int, LiveJob] = {}
        for name in self.directory.names():
            parts = _JOB_FILE.fullmatch(name)
            fd = None if parts is None else self.directory.open(name)
            if parts is None or fd is None:
                continue
            try:
                if not _is_locked(fd):
                    if sweep:
                        self._remove_dead(name, fd)
                    continue
                status, record = os.fstat(fd), decode(read_small(fd, LIMIT_BYTES))
            finally:
                os.close(fd)
            ticket, job_id = int(parts[1]), f"{int(parts[1])}-{parts[2]}"
            if record is not None and (record.id, record.ticket) != (job_id, ticket):
                record = None
            # under several names (hard links) it is the one that its record names
            if record is not None or status.st_ino not in by_inode:
                by_inode[status.st_ino] = LiveJob(name, ticket, job_id, status.st_uid, record)
        return sorted(by_inode.values(), key=lambda job: (job.ticket, job.id))

    def _remove_dead(self, name: str, fd: int) -> None:
        """Remove a dead job's record, and charge this user for a killed launcher of its own."""
        record, is_mine = decode(read_small(fd, LIMIT_BYTES)), os.fstat(fd).st_uid == os.geteuid()
        if self.directory.remove(name) and is_mine and record is not None and record.gpus:
            # nobody knows when the last of its processes ended
            add_usage(self.directory, record, min(boottime(), record.charged_at + CHARGE_SECONDS))

    def is_alive(self, name: str) -> bool:
        """Return whether somebody holds the lock of a job's record."""
        fd = self.directory.open(name)
        if fd is None:
            return False
        try:
            return _is_locked(fd)
        finally:
            os.close(fd)

    def lock_holder(self) -> str | None:
        """Return who holds the queue lock right now, ``pid 812``; None if nobody does."""
        status = os.fstat(self.directory.fd)
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        try:
            lines = Path("/proc/locks").read_text().splitlines()
        except OSError:
            return None
        for line in lines:
            if " FLOCK " in line and f" {device}:{status.st_ino} " in line and "->" not in line:
                return f"pid {line.split()[4]}"
        return None

    def enter(self, record: JobRecord, jobs: Sequence[LiveJob]) -> Reservation:
        """Join the queue behind the living ``jobs``; only under the queue lock.

        Raises:
            QueueProblem: the file cannot be made or written.
        """
        # the last ticket may be several jobs': then the time at which they came orders them
        ticket = min(1 + max((job.ticket for job in jobs), default=0), LAST_TICKET)
        now = boottime()
        return Reservation(self, replace(record, ticket=ticket, queued_at=now, since=now))


@contextlib.contextmanager
def existing_registry(path: Path) -> Iterator[JobRegistry | None]:
    """Open the jobs of the queue directory at ``path``; None if it cannot be used."""
    registry = None
    with contextlib.suppress(QueueProblem):
        registry = JobRegistry(path) if os.path.exists(path) else None
    try:
        yield registry
    finally:
        if registry is not None:
            registry.close()


class Reservation:
    """This job's own record file: its queue position, and later its reservation on its GPUs.

    Whoever has its descriptor ``fd`` open keeps it alive; -1 once released.
    """

    def __init__(self, registry: JobRegistry, record: JobRecord) -> None:
        self._registry = registry
        token = record.id.rpartition("-")[2] or os.urandom(3).hex()
        self.record = replace(record, id=f"{record.ticket}-{token}")
        self.name = f"{PREFIX}{record.ticket:010}.{token}"
        self._keepers: list[subprocess.Popen[bytes]] = []
        self.fd = self._create(self.record)

    def update(self, record: JobRecord) -> None:
        """Replace the record, under the same ticket; only under the queue lock.

        The GPU time until now is added to the user's.

        Raises:
            QueueProblem: it cannot be written; the old record and its lock still stand.
        """
        if self.fd < 0:
            return
        if record.state is not self.record.state:
            record = replace(record, since=boottime())
        if record.gpus or self.record.gpus:
            record = replace(record, charged_at=boottime())
        if self.record.gpus:
            add_usage(self._registry.directory, self.record, record.charged_at)
        record = replace(record, id=self.record.id, ticket=self.record.ticket)
        if not self.is_in_place():
            self._make_anew(record)
        elif record != self.record or decode(read_small(self.fd, LIMIT_BYTES)) is None:
            self._write(self.fd, record)
        self.record = record

    def is_in_place(self) -> bool:
        """Return whether others still find this job under its name."""
        return self._registry.directory.is_still(self.name, self.fd)

    def release(self) -> None:
        """Release the reservation. What still has the descriptor open keeps it all the same.

        Needs no queue lock, because a name is never used again.
        """
        if self.fd < 0:
            return
        fd, self.fd = self.fd, -1
        os.close(fd)
        for keeper in self._keepers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                keeper.wait(1.0)
        # the name goes only after the lock: while an orphan of ours lives, others must see it
        if not self._registry.is_alive(self.name):
            self._registry.directory.remove(self.name)

    def _make_anew(self, record: JobRecord) -> None:
        """Write the record into a new file, because a cleaner removed the old one.

        A running attempt has only the old descriptor. So a small process holds the new one as well,
        as long as anybody holds the lock of the old file.
        """
        fd = self._create(record)
        old, self.fd = self.fd, fd
        try:
            # another opened file, whose lock meets that of the inherited descriptor
            again = os.open(f"/proc/self/fd/{old}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._keepers.append(
                    subprocess.Popen(
                        [sys.executable, "-I", "-S", "-c", _KEEPER, str(again)],
                        pass_fds=(again, fd),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        start_new_session=True,  # a signal to the launcher's group is not for it
                    )
                )
            finally:
                os.close(again)
        except OSError as error:
            raise _unwritable(self._registry.directory, error) from error
        finally:
            os.close(old)

    def _create(self, record: JobRecord) -> int:
        directory = self._registry.directory
        try:
            fd = directory.create(self.name, 0o644)
        except OSError as error:
            raise _unwritable(directory, error) from error
        try:
            # another process may probe the new file for a moment
            _take_lock(fd, time.monotonic() + 1.0)
            self._write(fd, record)
        except BaseException as error:
            directory.remove(self.name)
            os.close(fd)
            if isinstance(error, OSError):
                raise _unwritable(directory, error) from error
            raise
        return fd

    def _write(self, fd: int, record: JobRecord) -> None:
        data = encode(record)
        try:
            written = os.pwrite(fd, data, 0)
            if written != len(data):
                raise OSError(28, "No space left on device")
            if os.fstat(fd).st_size != len(data):
                os.ftruncate(fd, len(data))
        except OSError as error:
            raise _unwritable(self._registry.directory, error) from error


def new_record(
    name: str, run_dir: str, need_bytes: int, jobs_per_device: int, count: int = 1, token: str = ""
) -> JobRecord:
    """Return a record of this process, not yet in the queue; ``token`` will end its id."""
    uid, pid = os.geteuid(), os.getpid()
    return JobRecord(
        id=token,
        ticket=0,
        state=JobState.WAITING,
        user=user_name(uid),
        uid=uid,
        pid=pid,
        started=started_at(pid) or 0.0,
        name=name,
        run_dir=run_dir,
        reserved_bytes=need_bytes,
        count=count,
        jobs_per_device=jobs_per_device,
    )


def boottime() -> float:
    """Return the seconds since the host was booted, sleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _is_locked(fd: int) -> bool:
    """Return whether somebody else holds the file's lock; the caller closes it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: probes do not meet
    except OSError:
        return True
    return False


def _take_lock(fd: int, deadline: float) -> None:
    """Lock a file; raise ``BlockingIOError`` if it is held until ``deadline`` (monotonic)."""
    pause = _SHORTEST_PAUSE_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)


def _unwritable(directory: QueueDir, error: OSError) -> QueueProblem:
    why = why_not_written(error) or f"cannot be written ({error.strerror})"
    return problem_with(directory.path, why)
