"""The small process beside a launcher that ends what a job leaves behind when its launcher is gone.

It knows the job's processes by their mark, whatever session, environment or parent they gave
themselves. When the launcher is gone, it asks them to stop, gives them time for a last checkpoint
and kills what is left. A fork whose parent is gone is killed at once: it has the signal handlers of
a program that has ended, and would save a checkpoint of its own.

This file is run by itself in an interpreter without site-packages (15 ms, 10 MiB): it imports
nothing but the standard library. Its command line names neither the package nor the job, and its
name is not Python's, so that ``pkill -f robust_train`` or ``killall python3`` does not end it
together with the launcher that it has to clean up after.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

_PR_SET_NAME = 15
_PF_FORKNOEXEC = 0x40  # a flag of a process that still runs its parent's program
_KILL_SECONDS = 5.0  # a process may hang in the kernel
_CHECK_MS = 1000
"""A fork of the launcher may keep the pipe open, so the parent's id is checked as well."""


def main() -> None:
    """Run as ``python -I -S reaper.py PIPE LAUNCHER STOP_SIGNAL GRACE SIGNAL…``. The launcher
    writes into the pipe, in lines, the job's mark, the last of which counts, and after an ``i`` the
    id of each interpreter, which is asked to stop whatever has become of its parent."""
    pipe, launcher, stop_signal, grace_seconds = sys.argv[1:5]
    stop_signals = [int(signum) for signum in sys.argv[5:]]
    for signum in stop_signals:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals)
    # kernels and sandboxes without it lose a safety net, not the function
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"job-reaper", 0, 0, 0)
    poll = select.poll()
    marks = b""
    poll.register(int(pipe), select.POLLIN)
    while os.getppid() == int(launcher):
        if poll.poll(_CHECK_MS):
            data = os.read(int(pipe), 4096)
            if not data:
                break
            marks += data
    interpreters = {int(word[1:]) for word in marks.split() if word.startswith(b"i")}
    mark_numbers = [int(word) for word in marks.split() if word.isdigit()]
    if mark_numbers:
        end_marked(
            mark_numbers[-1], os.getuid(), int(stop_signal), float(grace_seconds), interpreters
        )


def end_marked(
    mark: int, uid: int, stop_signal: int, grace_seconds: float, interpreters: Collection[int] = ()
) -> None:
    """Ask a user's processes with a mark to stop, except those that another of them started, but
    kill a fork whose parent is gone unless it is one of ``interpreters``. After ``grace_seconds``,
    kill all."""
    kill_at = time.monotonic() + grace_seconds
    is_asked = False
    while (now := time.monotonic()) < kill_at + _KILL_SECONDS:
        left = _marked(mark, uid)
        if not left:
            return
        for pid, (parent, is_fork) in left.items():
            is_left_behind = parent not in left and pid not in interpreters
            with contextlib.suppress(OSError):
                if now >= kill_at or (is_fork and is_left_behind):
                    os.kill(pid, signal.SIGKILL)
                elif not is_asked and parent not in left:
                    os.kill(pid, stop_signal)
        is_asked = True
        time.sleep(0.02)


def mark_of(pid: int | str) -> int | None:
    """Return the mark of a process, also of a zombie, or None if it is of no job."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        limits = Path(f"/proc/{pid}/limits").read_bytes()
        return int(limits.partition(b"Max file locks")[2].split(None, 1)[0])
    return None


def _marked(mark: int, uid: int) -> dict[int, tuple[int, bool]]:
    """Return a user's living processes with a mark, except this process, each with its parent and
    whether it is a fork that runs the parent's program."""
    marked = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            state, parent, *fields = file.read().rpartition(b")")[2].split()
            is_meant = os.fstat(file.fileno()).st_uid == uid and mark_of(pid) == mark
            if is_meant and pid != os.getpid() and state not in (b"Z", b"X"):
                is_fork = bool(int(fields[4]) & _PF_FORKNOEXEC)
                marked[pid] = int(parent), is_fork
    return marked


if __name__ == "__main__":
    main()
