"""Kernel features that ``psutil`` lacks: subreapers, the processes of a job, polling, write
locks."""

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

TICK_SECONDS = 0.5
FOREVER_SECONDS = 1e6

_PF_FORKNOEXEC = 0x40
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PUNCH_HOLE_AND_KEEP_SIZE = 3
_KILL_SECONDS = 5.0  # a process may hang in the kernel

# struct flock: type, whence, start, length (0: to the end), pid; padded as the compiler does
_FLOCK = struct.Struct("hhqqi0q")

# looked up here and not at its call, which may be between fork and exec
_libc_prctl = ctypes.CDLL(None).prctl
_libc_fallocate = ctypes.CDLL(None).fallocate


def shared_machine_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that will import torch on a machine with other jobs.

    OpenMP's threads spin while they wait, on cores that other jobs want. Without spinning, each
    parallel region costs a system call, so GNU's library (in torch's wheels) spins for a thousand
    rounds. Other libraries know only the variable of the standard. Exported variables take
    precedence.
    """
    if "OMP_WAIT_POLICY" in environ or "GOMP_SPINCOUNT" in environ:
        return dict(environ)
    return {**environ, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}


def signal_at_parents_death(signum: int) -> None:
    """Receive ``signum`` when the thread that forked this process ends. Forks do not inherit
    this."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def become_subreaper(*, on: bool = True) -> None:
    """Become the parent of descendants whose own parent ended, instead of process 1."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(on))


def _prctl(option: int, value: int) -> None:
    """Try it: kernels and sandboxes without it lose a safety net, not the function."""
    _libc_prctl(option, value, 0, 0, 0)


def release_blocks(path: Path, offset: int, length: int) -> None:
    """Return part of a file to the disk, as zeros. A file system that cannot do so (NFS before 4.2)
    keeps it."""
    begin = ctypes.c_long(offset)
    size = ctypes.c_long(length)
    with contextlib.suppress(OSError), path.open("r+b") as file:
        _libc_fallocate(file.fileno(), _PUNCH_HOLE_AND_KEEP_SIZE, begin, size)


def children(*, recursive: bool = False) -> list[psutil.Process]:
    """Return this process's children, including zombies and the orphans of a subreaper. With
    ``recursive``, return all descendants."""
    try:
        return psutil.Process().children(recursive)
    except psutil.Error:
        return []


def collect(pid: int) -> bool:
    """Collect the child ``pid`` if it has ended, and return whether it runs."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    except ChildProcessError:
        return False


def is_fork(pid: int) -> bool:
    """Return whether a process still runs the program of the process that forked it, and so has its
    signal handlers. False if it runs another program or has ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path(f"/proc/{pid}/stat").read_bytes()
        flags = int(status.rpartition(b")")[2].split()[6])
        return bool(flags & _PF_FORKNOEXEC)
    return False


def kill_descendants(
    is_ours: Callable[[psutil.Process], bool],  # which descendants are meant
) -> list[int]:
    """Kill and collect this process's descendants until none is left. This process has to be a
    subreaper: a killed process leaves its own children to it. Returns the processes that are still
    there."""
    deadline = time.monotonic() + _KILL_SECONDS
    pause = 0.002
    while True:
        left = [child.pid for child in children(recursive=True) if _is_killed(child, is_ours)]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _is_killed(process: psutil.Process, is_ours: Callable[[psutil.Process], bool]) -> bool:
    """Kill a process that is ours and collect it if it is a child, and return whether it is
    left."""
    try:
        if not is_ours(process):
            return False
        process.kill()
        collect(process.pid)
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


# --- the processes of a job ------------------------------------------------------------------
#
# Each has the last part of its job's id as its limit of file locks: the launcher sets it on what
# it starts, and all that this starts inherits it. No kernel since 2.4.25 reads that limit. A
# process leaves its session, its environment and its files behind, but not its limits; and they can
# be read of every process, also once all that knew of it were killed.

_RLIMIT_LOCKS = 10


def job_mark(job: str) -> int:
    """Return the limit that marks the processes of the job with this id, or -1 if processes cannot
    have it."""
    with contextlib.suppress(ValueError):
        return int(job.rpartition("-")[2], 16)
    return -1


def set_mark(pid: int, mark: int) -> None:
    """Mark a process and all that it will start."""
    with contextlib.suppress(OSError):  # it has ended
        _, most = resource.prlimit(pid, _RLIMIT_LOCKS)
        try:
            resource.prlimit(pid, _RLIMIT_LOCKS, (mark, most))
        except ValueError:
            _warn_of_limit(most)


@functools.cache
def _warn_of_limit(most: int) -> None:
    log.warning(
        "ulimit -Hx is %d: should this job be killed, what it leaves behind is not known as its "
        "own, and not ended; have the administrator allow 16777216 or more (locks in limits.conf)",
        most,
    )


def marked_processes() -> dict[int, list[int]]:
    """Return the processes of jobs, of all users, by their marks."""
    marked: dict[int, list[int]] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        mark = mark_of(pid)
        if mark is not None:
            marked.setdefault(mark, []).append(int(pid))
    return marked


def processes_of(
    job: str,  # its id
    uid: int,  # its user: others can set the limit as well
    marked: Callable[[], Mapping[int, Sequence[int]]] = marked_processes,
) -> list[psutil.Process]:
    """Return the living processes of a job, except its launcher and this process."""
    living = []
    for pid in marked().get(job_mark(job), ()):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            has_ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            if not has_ended and process.uids().real == uid and pid != os.getpid():
                living.append(process)
    return living


def named(processes: Iterable[psutil.Process]) -> str:
    """Return processes as people look for them: ``pid 17 (python), pid 18 (sleep)``."""
    names = []
    for process in processes:
        name = "?"
        with contextlib.suppress(psutil.Error):
            name = one_line(process.name())
        names.append(f"pid {process.pid} ({name})")
    return ", ".join(names)


def end_processes_of(job: str, uid: int, grace_seconds: float) -> list[psutil.Process]:
    """End the remaining processes of a job without a launcher, and return those that cannot be
    ended.

    SIGTERM goes to those that none of the others started, so that they can save a last checkpoint.
    Then all are killed.
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


def readable(descriptors: Iterable[int], seconds: float) -> set[int]:
    """Wait until a descriptor becomes readable, and return the readable descriptors."""
    poll = select.poll()  # not select.select: descriptors may be above 1023
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(seconds * 1000)}


# --- write locks -----------------------------------------------------------------------------
#
# These are open-file-description locks, on whole files unless a byte is named: one belongs to an
# opened file, so children inherit it with the descriptor, and it is free once the last process has
# closed that, however it ended. Unlike `flock` a write lock needs a descriptor that may write, so
# who may only read a file cannot hold it. A read lock of a stranger would still keep us from
# *taking* a write lock: take it before others can open the file, or keep the file private.


def lock(fd: int, start: int = 0, length: int = 0) -> bool:
    """Take the write lock. Returns False if another opened file has a lock on it. A length of 0
    means up to the end.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK, start, length))
    except BlockingIOError:
        return False
    return True


def unlock(fd: int, start: int = 0, length: int = 0) -> None:
    """Release the lock, also for the processes that have inherited the descriptor."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, start, length))


def is_locked(fd: int) -> bool:
    """Return whether another opened file holds the write lock. Read locks do not count.

    Raises:
        OSError: the file system has no locks.
    """
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _request(fcntl.F_RDLCK))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _request(kind: int, start: int = 0, length: int = 0) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
