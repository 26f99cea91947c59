"""Jobs' reservations and tickets: one file a job, alive as long as its lock is held.

The lock is a ``flock``, so it belongs to whoever has the descriptor open: the launcher, and the
process tree of its attempt, which inherits it. When the last of them is gone, however they went,
the kernel has let go of it, and what is left is a file that anybody may sweep away. Nothing is
decided by a process id, a clock or the age of a file.

The ledger lock is a ``flock`` on the directory itself: there is no file that somebody could remove,
own or fill. Each opened :class:`Ledger` has its own descriptor, so it also keeps threads apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from robust_train.gpu.holders import user_name
from robust_train.queue.queue_dir import QueueDir, QueueProblem, open_queue_dir, read_small
from robust_train.queue.records import LIMIT_BYTES, JobRecord, JobState, decode, encode

PREFIX = "job."
BELL_PREFIX = "bell."
_JOB_FILE = re.compile(r"job\.(\d{1,15})\.([0-9a-f]{6})", re.ASCII)
_LAST_TICKET = 10**15 - 1
_LOCK_SECONDS = 10.0
_PAUSE_SECONDS = (0.0005, 0.02)
_STOPS = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}


class LedgerBusy(Exception):
    """Somebody holds the ledger lock for too long (stopped with Ctrl-Z, or a wedged driver)."""


@dataclass(frozen=True)
class Entry:
    """A living job of this host.

    Attributes:
        name: of its file.
        ticket: its place in line.
        id: unique among the jobs of this boot.
        owner: the user that the file belongs to, which unlike the record cannot be made up.
        record: what it says; None where that cannot be read, so that it may hold any GPU.
    """

    name: str
    ticket: int
    id: str
    owner: int
    record: JobRecord | None


class Ledger:
    """The jobs of this host, as one process sees and changes them.

    Args:
        path: the queue directory.

    Raises:
        QueueProblem: the directory cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.directory: QueueDir = open_queue_dir(path)
        self._read_before: dict[str, tuple[bytes, JobRecord | None]] = {}

    def close(self) -> None:
        """Close the directory; a lock that is held ends."""
        self.directory.close()

    @contextlib.contextmanager
    def locked(self, timeout_seconds: float = _LOCK_SECONDS) -> Iterator[None]:
        """Nobody else decides within this block.

        Raises:
            LedgerBusy: the lock was not to be had in time.
            QueueProblem: the directory is gone and cannot be made again.
        """
        # Ctrl-Z takes effect after the block, or nobody on the host could decide any more
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        try:
            self._lock(timeout_seconds)
            try:
                yield
            finally:
                fcntl.flock(self.directory.fd, fcntl.LOCK_UN)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _lock(self, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        pause, longest = _PAUSE_SECONDS
        while True:
            try:
                fcntl.flock(self.directory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise LedgerBusy(
                        f"another process holds the lock of {self.directory.path} for more than "
                        f"{timeout_seconds:g} s (robust-train doctor names it)"
                    ) from None
                time.sleep(pause * random.uniform(0.5, 1.5))
                pause = min(pause * 1.5, longest)
                continue
            if self.directory.exists_still():
                return
            # somebody removed the directory: those who come now would see another one
            self.directory.close()
            self.directory = open_queue_dir(self._path)

    def entries(self, *, sweep: bool = False) -> list[Entry]:
        """The living jobs, in the order of their tickets.

        Args:
            sweep: remove what dead jobs left; only under the ledger lock.
        """
        found = []
        read: dict[str, tuple[bytes, JobRecord | None]] = {}
        names = self.directory.names()
        if sweep:
            jobs = set(names)
            for name in names:
                if name.startswith(BELL_PREFIX) and PREFIX + name[len(BELL_PREFIX) :] not in jobs:
                    self.directory.remove(name)
        for name in names:
            parts = _JOB_FILE.fullmatch(name)
            if parts is None:
                continue
            fd = self.directory.open(name)
            if fd is None:
                continue
            try:
                if not _is_locked(fd):
                    if sweep:
                        self.directory.remove(name)
                    continue
                ticket, token = int(parts[1]), parts[2]
                owner, data = os.fstat(fd).st_uid, read_small(fd, LIMIT_BYTES)
            finally:
                os.close(fd)
            job_id = _job_id(ticket, token)
            before, record = self._read_before.get(name, (None, None))
            if data != before:  # to read a record costs more than to find that it is the same
                record = decode(data)
            if record is not None and (record.id, record.ticket) != (job_id, ticket):
                record = None
            read[name] = (data, record)
            found.append(Entry(name, ticket, job_id, owner, record))
        self._read_before = read
        return sorted(found, key=lambda entry: (entry.ticket, entry.id))

    def is_alive(self, name: str) -> bool:
        """Whether somebody holds the lock of a job's file."""
        fd = self.directory.open(name)
        if fd is None:
            return False
        try:
            return _is_locked(fd)
        finally:
            os.close(fd)

    def who_decides(self) -> str | None:
        """Who holds the ledger lock right now, ``pid 812``; None where nobody does."""
        told = os.fstat(self.directory.fd)
        inode = f":{told.st_ino} "
        device = f" {os.major(told.st_dev):02x}:{os.minor(told.st_dev):02x}"
        try:
            lines = Path("/proc/locks").read_text().splitlines()
        except OSError:
            return None
        for line in lines:
            if " FLOCK " in line and device + inode in line and "->" not in line:
                return f"pid {line.split()[4]}"
        return None

    def waits(self, name: str) -> bool:
        """Whether the job behind a file is alive and in line."""
        fd = self.directory.open(name)
        if fd is None:
            return False
        try:
            record = decode(read_small(fd, LIMIT_BYTES))
            waits = record is not None and record.state is JobState.WAITING
            return waits and _is_locked(fd)
        finally:
            os.close(fd)

    def hang_up(self, bell: str) -> None:
        """Make a bell: a file whose times anybody may touch, and that says nothing."""
        with contextlib.suppress(OSError):
            os.close(self.directory.create(bell, 0o666))

    def ring(self, bell: str) -> None:
        """Wake the job whose bell it is."""
        fd = self.directory.open(bell)
        if fd is not None:
            with contextlib.suppress(OSError):
                os.utime(fd)
            os.close(fd)

    def time_of(self, name: str) -> int:
        """When a file was last touched, to be compared with itself; -1 where there is none."""
        try:
            told = os.stat(name, dir_fd=self.directory.fd, follow_symlinks=False)
        except OSError:
            return -1
        return told.st_mtime_ns

    def enter(self, record: JobRecord, entries: Sequence[Entry]) -> Reservation:
        """Take the next ticket; only under the ledger lock.

        Args:
            record: what the job says of itself; id, ticket and times are filled in.
            entries: the living jobs.

        Raises:
            QueueProblem: the file cannot be made or written.
        """
        ticket = 1 + max((entry.ticket for entry in entries), default=0)
        if ticket > _LAST_TICKET:
            raise QueueProblem(f"the tickets in {self.directory.path} have run out; empty it")
        now = boottime()
        record = replace(record, ticket=ticket, queued_at=now, since=now)
        return Reservation(self, record)


class Reservation:
    """This job's own file: its place in line, and later its claim on its GPUs.

    Attributes:
        record: what the file says.
        fd: holds the lock; whoever has it open keeps the reservation alive.
    """

    def __init__(self, ledger: Ledger, record: JobRecord) -> None:
        self._ledger = ledger
        self.record = record
        self.name = ""
        self.fd = -1
        self._create()

    def update(self, record: JobRecord) -> None:
        """Say something else, under the same ticket; only under the ledger lock.

        Raises:
            QueueProblem: it cannot be written; what was said before still stands.
        """
        if record.state is not self.record.state:
            record = replace(record, since=boottime())
        record = replace(record, id=self.record.id, ticket=self.record.ticket)
        if record == self.record and self.is_in_place() and self._is_intact():
            return
        old, self.record = self.record, record
        try:
            if self.is_in_place():
                self._write()
            else:  # a cleaner removed the file, so nobody would see this claim
                os.close(self.fd)
                self._create()
        except QueueProblem:
            self.record = old
            raise

    def is_in_place(self) -> bool:
        """Whether others still find this job under its name."""
        return self._ledger.directory.is_still(self.name, self.fd)

    def give_sign(self) -> None:
        """Show those behind that this job still looks."""
        now = time.time_ns()  # the kernel's own would be the same for some milliseconds
        with contextlib.suppress(OSError):
            os.utime(self.fd, ns=(now, now))

    def _is_intact(self) -> bool:
        return decode(read_small(self.fd, LIMIT_BYTES)) is not None

    def release(self) -> None:
        """Give everything back. What still has the descriptor open keeps its claim all the same.

        Needs no ledger lock: a name is never used again, so nobody can take another file for it.
        """
        if self.fd < 0:
            return
        directory, fd = self._ledger.directory, self.fd
        self.fd = -1
        os.close(fd)
        # the name goes only after the lock: while an orphan of ours lives, others must see it
        if not self._ledger.is_alive(self.name):
            directory.remove(self.name)

    def _create(self) -> None:
        directory = self._ledger.directory
        token = self.record.id.rpartition("-")[2] or os.urandom(3).hex()
        self.name = f"{PREFIX}{self.record.ticket:010}.{token}"
        self.record = replace(self.record, id=_job_id(self.record.ticket, token))
        try:
            self.fd = directory.create(self.name, 0o644)
        except OSError as error:
            raise _unwritable(directory, error) from error
        try:
            _lock_new(self.fd, directory)
            self._write()
        except BaseException:
            directory.remove(self.name)
            os.close(self.fd)
            self.fd = -1
            raise

    def _write(self) -> None:
        data = encode(self.record)
        try:
            written = os.pwrite(self.fd, data, 0)
            if written != len(data):
                raise OSError(28, "No space left on device")
            if os.fstat(self.fd).st_size != len(data):
                os.ftruncate(self.fd, len(data))
        except OSError as error:
            raise _unwritable(self._ledger.directory, error) from error


def new_record(
    name: str, run_dir: str, claim_bytes: int, jobs_per_device: int, count: int = 1
) -> JobRecord:
    """A record of this process, not yet in line."""
    uid = os.geteuid()
    return JobRecord(
        id="",
        ticket=0,
        state=JobState.WAITING,
        user=user_name(uid),
        uid=uid,
        pid=os.getpid(),
        start_ticks=start_ticks(os.getpid()) or 0,
        name=name,
        run_dir=run_dir,
        claim_bytes=claim_bytes,
        count=count,
        jobs_per_device=jobs_per_device,
    )


def boottime() -> float:
    """Seconds since the host was booted, sleep included; no clock change touches it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return int(told.rpartition(")")[2].split()[19])  # a command's name may hold anything
    except (OSError, ValueError, IndexError):
        return None


def _is_locked(fd: int) -> bool:
    """Whether somebody else holds the file's lock. A shared lock is tried: probes do not meet."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False  # the caller closes the descriptor, and with it this lock


def _lock_new(fd: int, directory: QueueDir) -> None:
    """Lock a file that was just made; who probes it at this moment is gone the next."""
    deadline = time.monotonic() + 1.0
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise _unwritable(directory, error) from error
            time.sleep(0.001)
        except OSError as error:
            raise _unwritable(directory, error) from error


def _job_id(ticket: int, token: str) -> str:
    return f"{ticket}-{token}"


def _unwritable(directory: QueueDir, error: OSError) -> QueueProblem:
    return QueueProblem(
        f"the queue directory {directory.path} cannot be written ({error.strerror}); make room, or "
        "name another one with gpu_queue_dir=…"
    )
