"""Locks a run folder, so that only one job uses it at a time, and shows whether that job is alive.

The launcher holds the write lock of ``<run folder>/lock``, and so does every process that inherits
the descriptor. The kernel frees the lock when the last of them has ended, for whatever reason.
Commands and sweeps read the lock. Only its owner may open the file, because another user could
otherwise lock it and keep the job from resuming.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from robust_train.files import parse_json, read_small
from robust_train.gpu.processes import is_there, own_pid_namespace, started_at, user_name
from robust_train.host.linux import (
    describe_processes,
    end_processes_of,
    is_locked,
    lock,
    marked_processes,
    processes_of,
    unlock,
)
from robust_train.model.errors import ConfigError, RunFolderLostError, RunFolderUnavailableError
from robust_train.model.events import from_json

log = logging.getLogger("robust_train")

LOCK_FILE = "lock"
# Longer than a new holder needs to write its name.
_RETRY_SECONDS = 0.5
# How long an attempt whose launcher was killed may take for its last checkpoint.
ORPHAN_SECONDS = 15.0
# Longer than a network disk keeps the locks of a lost host (NFS 4: 90 s).
LEASE_SECONDS = 100.0
_POLL_SECONDS = 0.02
_MAX_BYTES = 4096
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class Holder:
    """The content of the lock file: the launcher that holds the lock, or held it last."""

    host: str
    pid: int
    # When the process started, in seconds since boot, because someone may set the clock.
    process_started: float
    since: float  # when it took the lock, in seconds since the epoch
    user: str
    job: str  # the mark of its job's processes
    pid_namespace: str  # the process namespace of `pid`

    @property
    def is_here(self) -> bool:
        """Whether this process is on the launcher's host and in its process namespace."""
        is_same = self.pid_namespace == own_pid_namespace()
        return is_same and self.host == socket.gethostname()

    @property
    def process(self) -> psutil.Process | None:
        """The launcher's process, None if it has ended or is not on this host."""
        if not self.is_here:
            return None
        with contextlib.suppress(psutil.Error, ValueError, OverflowError):
            if is_there(self.pid, self.process_started):
                return psutil.Process(self.pid)
        return None

    @property
    def is_dead(self) -> bool:
        """Whether the launcher's process is known to have ended."""
        return self.is_here and self.process is None


class RunLock:
    """Takes a run folder's lock, and holds it until `release`.

    Args:
        run_dir: the run folder.
        job: the mark of the job's processes.

    Attributes:
        hold: the descriptors that an attempt and its child processes keep open. Empty if the disk
            cannot lock.

    Raises:
        ConfigError: a live job of this host holds the lock. Nothing was written.
        RunFolderUnavailableError: a process of another host holds the lock, or may hold it, even
            after a wait. Nothing was written.
    """

    def __init__(self, run_dir: Path, job: str) -> None:
        self.hold: tuple[int, ...] = ()
        self._fd: int | None = None
        self._run_dir = run_dir
        self._job = job
        self._is_named = False
        path = run_dir / LOCK_FILE
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
            fd = self._fd
            _wait_until(lambda: lock(fd), run_dir)
        except ConfigError:
            self.release()
            raise
        # Some network disks cannot lock (ENOLCK, ENOTSUP). A disk may also be full or read-only.
        except OSError as error:
            # Without a lock, the name in the file at least shows other jobs of this host.
            if self._fd is not None:
                _refuse_second(run_dir)
                self._is_named = _write_holder(self._fd, job)
            self.release()
            log.warning(
                "%s cannot be locked (%s): a second job of another host is not refused here",
                path,
                error.strerror,
            )
            return
        self.hold = (self._fd,)
        self._is_named = _write_holder(self._fd, job)

    def check(self) -> None:
        """Check that the folder still belongs to this job. Call this before each write to it.

        Raises:
            RunFolderLostError: another job has taken the folder, which someone may have removed
                and created again.
        """
        holder = read_holder(self._run_dir)
        if self._is_named and holder is not None and holder.job != self._job:
            raise RunFolderLostError(
                f"{self._run_dir}: this run folder was removed, or its lock was lost, and it is "
                f"now in use by {_name_of(holder)}; this job stops and writes nothing more there"
            )

    def release(self) -> None:
        """Release the lock, also for processes that still have the descriptor."""
        fd = self._fd
        self._fd = None
        self.hold = ()
        if fd is not None:
            with contextlib.suppress(OSError):
                unlock(fd)
            os.close(fd)


def _refuse_second(run_dir: Path) -> None:
    """Refuse a second job in a folder whose disk cannot lock.

    Raises:
        ConfigError: another process of this host is known to run a job in the folder.
    """
    holder = read_holder(run_dir)
    process = None if holder is None else holder.process
    if process is not None and process.pid != os.getpid():
        raise ConfigError(_in_use(run_dir))


def _write_holder(fd: int, job: str) -> bool:
    """Write this process and its job into the lock file. Returns False if the disk is full."""
    holder = Holder(
        socket.gethostname(),
        os.getpid(),
        started_at(os.getpid()),
        time.time(),
        user_name(os.geteuid()),
        job,
        own_pid_namespace(),
    )
    # The lock holds even if a full disk keeps the file empty.
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(asdict(holder)).encode(), 0)
        return True
    return False


def is_held(run_dir: Path) -> bool | None:
    """Return whether a job is alive in the folder.

    None if that is unknown, because the disk cannot lock or the folder belongs to another user.
    """
    try:
        fd = os.open(run_dir / LOCK_FILE, os.O_RDONLY | _FLAGS)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        return is_locked(fd)
    except OSError:
        return None
    finally:
        os.close(fd)


def is_alive(run_dir: Path, *, has_ended: bool) -> bool:
    """Return whether the job or sweep of a folder is alive.

    If the lock cannot be read, the job counts as alive unless its records say that it ``has_ended``
    or its launcher is known to have ended.
    """
    held = is_held(run_dir)
    if held is not None:
        return held
    holder = read_holder(run_dir)
    return not has_ended and not (holder is not None and holder.is_dead)


def read_holder(run_dir: Path) -> Holder | None:
    """Return the holder of the folder's lock, or its last holder, or None if unknown."""
    try:
        data, _ = read_small(run_dir / LOCK_FILE, _MAX_BYTES)
        holder = from_json(Holder, parse_json(data))
        time.localtime(holder.since)  # raises an error for a time that cannot be shown
    except (OSError, ValueError, OverflowError):  # ValueError includes MalformedEventError
        return None
    return holder


def refusal(run_dir: Path) -> str | None:
    """Return why a second job cannot start in the folder now, or None if it can."""
    holder = read_holder(run_dir)
    if not is_held(run_dir) or (holder is not None and holder.is_dead):
        return None
    return _in_use(run_dir)


def wait_until_free(run_dir: Path) -> None:
    """Wait until the folder is free. Call this before anything is written to the folder.

    Raises:
        ConfigError: a live job holds the folder, as in `RunLock`.
    """
    _wait_until(lambda: not is_held(run_dir), run_dir)


def _wait_until(is_free: Callable[[], bool], run_dir: Path) -> None:
    """Wait until the folder is free, if its holder will release it without help.

    This waits for the last attempt of a dead launcher, or for the lock of a lost host. It does not
    wait if the holder is a live job on this host.

    Raises:
        ConfigError: the folder is not free. RunFolderUnavailableError if it did not become free.
    """
    _end_leftovers(run_dir)
    started = time.monotonic()
    has_warned = False
    while True:
        if is_free():
            return
        waited = time.monotonic() - started
        if waited > _RETRY_SECONDS:
            holder = read_holder(run_dir)
            if holder is not None and holder.process is not None:
                raise ConfigError(_in_use(run_dir))
            limit = LEASE_SECONDS
            why = "until the disk releases the lock of a lost host"
            if holder is not None and holder.is_dead:
                limit = ORPHAN_SECONDS
                why = "for the last checkpoint of its attempt"
            if waited > limit:
                raise RunFolderUnavailableError(_in_use(run_dir))
            if not has_warned:
                has_warned = True
                log.warning(
                    "the run folder is held by %s: waiting up to %.0f s %s",
                    _name_of(holder),
                    limit,
                    why,
                )
        time.sleep(_POLL_SECONDS)


def left_of(
    holder: Holder, marked: Callable[[], Mapping[int, Sequence[int]]] = marked_processes
) -> list[psutil.Process]:
    """Return this user's remaining processes of a job whose launcher was killed."""
    if not holder.is_dead:
        return []
    return processes_of(holder.job, os.geteuid(), marked)


def _end_leftovers(run_dir: Path) -> None:
    """End the remaining processes of the folder's last job, after giving its attempt time for a
    checkpoint."""
    holder = read_holder(run_dir)
    if holder is None:
        return
    left = left_of(holder)
    if not left:
        return
    log.warning(
        "the launcher of an earlier job in this folder (pid %d) was killed: ending the job's "
        "remaining processes (%s), after at most %.0f s for a last checkpoint",
        holder.pid,
        describe_processes(left),
        ORPHAN_SECONDS,
    )
    left = end_processes_of(holder.job, os.geteuid(), ORPHAN_SECONDS)
    if left:
        log.warning("%s cannot be ended: it hangs in the kernel", describe_processes(left))


def _in_use(run_dir: Path) -> str:
    """Return the message for a folder that another job uses."""
    holder = _name_of(read_holder(run_dir))
    return (
        f"folder {run_dir} is in use by {holder}; choose another folder (hydra.run.dir=…, a "
        "sweep's hydra.sweep.dir=…, or --run-dir of robust-train run), or stop that job: "
        f"robust-train stop {run_dir}"
    )


def _name_of(holder: Holder | None) -> str:
    if holder is None:
        return "another job"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
    killed = ", which was killed, but its attempt still runs" if holder.is_dead else ""
    return f"the job of {holder.user} on {holder.host}, pid {holder.pid}{killed}, since {since}"
