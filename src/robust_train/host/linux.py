"""Linux features that ``psutil`` and the standard library lack: subreapers, marks by which a job's
processes are found, and write locks. Launchers, attempts and commands use it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import logging
import os
import resource
import select
import signal
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from robust_train.host.reaper import end_marked, mark_of
from robust_train.readable import one_line

log = logging.getLogger("robust_train")

TICK_SECONDS = 0.5  # longest time between two looks of a waiting loop at what it waits for
FOREVER_SECONDS = 1e6

_PF_FORKNOEXEC = 0x40  # a flag of a process that still runs its parent's program
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PUNCH_HOLE_AND_KEEP_SIZE = 3
_KILL_SECONDS = 5.0  # longest wait for killed processes, which may hang in the kernel

# struct flock: type, whence, start, length (0: to the end), pid, with the compiler's padding.
_FLOCK = struct.Struct("hhqqi0q")

# Looked up at import, because a lookup between fork and exec is not safe.
_libc_prctl = ctypes.CDLL(None).prctl
_libc_fallocate = ctypes.CDLL(None).fallocate


def shared_machine_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that will import torch on a machine with other jobs.

    OpenMP's threads spin while they wait, on cores that other jobs need, so they sleep instead.
    GNU's library, which torch's wheels contain, may still spin for a thousand rounds, because each
    sleep costs a system call. Exported variables take precedence.
    """
    if "OMP_WAIT_POLICY" in environ or "GOMP_SPINCOUNT" in environ:
        return dict(environ)
    return {**environ, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}


def signal_at_parents_death(signum: int) -> None:
    """Make the kernel send ``signum`` to this process when the thread that forked it ends. Forks of
    this process do not inherit the setting."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def become_subreaper(*, on: bool = True) -> None:
    """Become the parent of descendants whose own parent ended, instead of process 1."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(on))


def _prctl(option: int, value: int) -> None:
    """Set an attribute of this process. An error is ignored, because a kernel or sandbox that
    refuses it only lacks a safety net."""
    _libc_prctl(option, value, 0, 0, 0)


def release_blocks(path: Path, offset: int, length: int) -> None:
    """Free the disk space of part of a file, which then reads as zeros. A file system that cannot
    do so, such as NFS before 4.2, keeps the content."""
    begin = ctypes.c_long(offset)
    size = ctypes.c_long(length)
    with contextlib.suppress(OSError), path.open("r+b") as file:
        _libc_fallocate(file.fileno(), _PUNCH_HOLE_AND_KEEP_SIZE, begin, size)


def list_children(*, recursive: bool = False) -> list[psutil.Process]:
    """Return this process's children, including zombies and the orphans of a subreaper. With
    ``recursive``, return all descendants."""
    try:
        return psutil.Process().children(recursive)
    except psutil.Error:
        return []


def collect(pid: int) -> bool:
    """Collect the exit status of the child ``pid`` if it has ended, and return whether it still
    runs."""
    try:
        collected, _ = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return False
    return collected == 0


def is_fork(pid: int) -> bool:
    """Return whether a process still runs the program of its parent, and so has the parent's signal
    handlers. False if it runs another program or has ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path(f"/proc/{pid}/stat").read_bytes()
        flags = int(status.rpartition(b")")[2].split()[6])
        return bool(flags & _PF_FORKNOEXEC)
    return False


def kill_descendants(is_ours: Callable[[psutil.Process], bool]) -> list[int]:
    """Kill this process's descendants for which ``is_ours`` is true, until none is left, and return
    the ids of processes that could not be killed.

    This process must be a subreaper, because the children of a killed process become its own.
    """
    deadline = time.monotonic() + _KILL_SECONDS
    pause = 0.002
    while True:
        ours = [child for child in list_children(recursive=True) if _is_meant(child, is_ours)]
        left = [child.pid for child in ours if not _kill(child)]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _is_meant(process: psutil.Process, is_ours: Callable[[psutil.Process], bool]) -> bool:
    try:
        return is_ours(process)
    except psutil.Error:
        return False


def _kill(process: psutil.Process) -> bool:
    """Kill a process, collect it if it is a child, and return whether it has ended."""
    try:
        process.kill()
        collect(process.pid)
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        # It has ended, or belongs to another user.
        return True


# --- the processes of a job ------------------------------------------------------------------
#
# The mark of a job is a number, the last part of its id. The launcher sets it as the limit of file
# locks (RLIMIT_LOCKS) on every process that it starts, and their children inherit it. No kernel
# since 2.4.25 uses this limit. A process may change its session, its environment and its open
# files, but it keeps its limits, and anyone can read them after the launcher has died.

_RLIMIT_LOCKS = 10


def job_mark(job: str) -> int:
    """Return the mark of the job with this id, or -1 if the id does not end with a number."""
    with contextlib.suppress(ValueError):
        return int(job.rpartition("-")[2], 16)
    return -1


def set_mark(pid: int, mark: int) -> None:
    """Mark a process, and so all processes that it will start."""
    # An OSError means that the process has ended.
    with contextlib.suppress(OSError):
        _, most = resource.prlimit(pid, _RLIMIT_LOCKS)
        try:
            resource.prlimit(pid, _RLIMIT_LOCKS, (mark, most))
        except ValueError:
            _warn_of_limit(most)


@functools.cache
def _warn_of_limit(most: int) -> None:
    log.warning(
        "ulimit -Hx is %d: if this job is killed, its remaining processes cannot be found and "
        "ended; ask the administrator to allow 16777216 or more (locks in limits.conf)",
        most,
    )


def marked_processes() -> dict[int, list[int]]:
    """Return the ids of the processes of all users' jobs, by their marks."""
    marked: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        mark = mark_of(name) if name.isdigit() else None
        if mark is not None:
            marked.setdefault(mark, []).append(int(name))
    return marked


def processes_of(
    job: str, uid: int, marked: Callable[[], Mapping[int, Sequence[int]]] = marked_processes
) -> list[psutil.Process]:
    """Return the living processes of a job, except its launcher and this process.

    Args:
        job: the job's id.
        uid: the job's user. Processes of other users do not count, because anyone can set a mark.
        marked: returns the marked processes, for callers that look for several jobs.
    """
    living = []
    for pid in marked().get(job_mark(job), ()):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            has_ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            if not has_ended and process.uids().real == uid and pid != os.getpid():
                living.append(process)
    return living


def describe_processes(processes: Iterable[psutil.Process]) -> str:
    """Return ids and names of processes: ``pid 17 (python), pid 18 (sleep)``."""
    names = []
    for process in processes:
        name = "?"
        with contextlib.suppress(psutil.Error):
            name = one_line(process.name())
        names.append(f"pid {process.pid} ({name})")
    return ", ".join(names)


def end_processes_of(job: str, uid: int, grace_seconds: float) -> list[psutil.Process]:
    """End the remaining processes of a job without a launcher, and return the processes that could
    not be ended.

    Processes that no other process of the job started receive SIGTERM, so that they can save a last
    checkpoint. After ``grace_seconds`` all are killed.
    """
    end_marked(job_mark(job), uid, signal.SIGTERM, grace_seconds)
    return processes_of(job, uid)


# --- polling ---------------------------------------------------------------------------------


def sleep_with_ticks(seconds: float, tick: Callable[[], None]) -> None:
    """Sleep, calling ``tick`` at least twice a second."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        tick()
        time.sleep(min(left, TICK_SECONDS))


def wait_until_readable(descriptors: Iterable[int], seconds: float) -> set[int]:
    """Wait up to ``seconds`` until a descriptor becomes readable, and return the readable
    descriptors."""
    # select.select refuses descriptors above 1023.
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(seconds * 1000)}


# --- write locks -----------------------------------------------------------------------------
#
# These are open-file-description locks. Such a lock belongs to an opened file: children inherit it
# with the descriptor, and it is released when the last process that has the descriptor closes it or
# ends. Unlike a `flock`, a write lock needs a descriptor that may write, so users who can only read
# a file cannot hold it. But a read lock of such a user would prevent us from taking a write lock.
# So take the lock before other users can open the file, or keep the file private.


def lock(fd: int, start: int = 0, length: int = 0) -> bool:
    """Take the write lock on part of a file, and return whether that succeeded. It fails if another
    opened file has a lock on it. A length of 0 means up to the end of the file.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK, start, length))
    except BlockingIOError:
        return False
    return True


def unlock(fd: int, start: int = 0, length: int = 0) -> None:
    """Release the lock, also for processes that have inherited the descriptor."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, start, length))


def is_locked(fd: int) -> bool:
    """Return whether another opened file holds the write lock. Read locks do not count.

    Raises:
        OSError: the file system has no locks.
    """
    # A read lock would be refused only because of a write lock.
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _request(fcntl.F_RDLCK))
    kind, *_ = _FLOCK.unpack(answer)
    return bool(kind != fcntl.F_UNLCK)


def _request(kind: int, start: int = 0, length: int = 0) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
