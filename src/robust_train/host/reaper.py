"""Ends a job's remaining processes after its launcher has died.

A launcher starts this file as a small process of its own. The process recognizes the job's
processes by their mark, whatever session, environment or parent they have. When the launcher dies,
it asks them to stop, gives them time for a last checkpoint, and then kills the rest. A fork whose
parent has ended is killed at once: it still has its parent's signal handlers, and would save a
second checkpoint.

The interpreter runs without site-packages (15 ms, 10 MiB), so this file imports only the standard
library. Its command line names neither the package nor the job, and its process name is not
Python's, so that ``pkill -f robust_train`` or ``killall python3`` does not end it together with the
launcher.
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
_KILL_SECONDS = 5.0  # longest wait for killed processes, which may hang in the kernel
# A fork of the launcher may keep the pipe open, so the parent's id is checked this often as well.
_CHECK_MS = 1000


def main() -> None:
    """Run as ``python -I -S reaper.py PIPE LAUNCHER STOP_SIGNAL GRACE SIGNAL…``.

    The launcher writes lines into the pipe. A number is the job's mark, and the last mark counts.
    ``i`` and a number are the process id of an interpreter, which is asked to stop even if its
    parent has ended.
    """
    pipe, launcher, stop_signal, grace_seconds = sys.argv[1:5]
    stop_signals = [int(signum) for signum in sys.argv[5:]]
    for signum in stop_signals:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals)
    # A kernel or sandbox that refuses it only loses the protection against killall.
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"job-reaper", 0, 0, 0)
    lines = b""
    poll = select.poll()
    poll.register(int(pipe), select.POLLIN)
    while os.getppid() == int(launcher):
        if poll.poll(_CHECK_MS):
            data = os.read(int(pipe), 4096)
            if not data:
                break
            lines += data
    words = lines.split()
    interpreters = {int(word[1:]) for word in words if word.startswith(b"i")}
    marks = [int(word) for word in words if word.isdigit()]
    if marks:
        uid = os.getuid()
        end_marked(marks[-1], uid, int(stop_signal), float(grace_seconds), interpreters)


def end_marked(
    mark: int, uid: int, stop_signal: int, grace_seconds: float, interpreters: Collection[int] = ()
) -> None:
    """Ask a user's processes with a mark to stop, and kill all of them after ``grace_seconds``.

    Only a process whose parent has no mark is asked, because it is responsible for its children. A
    fork whose parent has ended is killed at once, unless it is one of ``interpreters``.
    """
    kill_at = time.monotonic() + grace_seconds
    is_asked = False
    while (now := time.monotonic()) < kill_at + _KILL_SECONDS:
        left = _find_marked(mark, uid)
        if not left:
            return
        for pid, (parent, is_fork) in left.items():
            is_orphan = parent not in left
            is_orphaned_fork = is_fork and is_orphan and pid not in interpreters
            with contextlib.suppress(OSError):
                if now >= kill_at or is_orphaned_fork:
                    os.kill(pid, signal.SIGKILL)
                elif is_orphan and not is_asked:
                    os.kill(pid, stop_signal)
        is_asked = True
        time.sleep(0.02)


def mark_of(pid: int | str) -> int | None:
    """Return the mark of a process or zombie, or None if it belongs to no job."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        limits = Path(f"/proc/{pid}/limits").read_bytes()
        return int(limits.partition(b"Max file locks")[2].split(None, 1)[0])
    return None


def _find_marked(mark: int, uid: int) -> dict[int, tuple[int, bool]]:
    """Return a user's living processes with a mark, except this process. Each has its parent's id,
    and whether it is a fork that runs the parent's program."""
    marked = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        pid = int(name)
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            state, parent, *fields = file.read().rpartition(b")")[2].split()
            is_of_job = os.fstat(file.fileno()).st_uid == uid and mark_of(pid) == mark
            if is_of_job and pid != os.getpid() and state not in (b"Z", b"X"):
                is_fork = bool(int(fields[4]) & _PF_FORKNOEXEC)
                marked[pid] = int(parent), is_fork
    return marked


if __name__ == "__main__":
    main()
