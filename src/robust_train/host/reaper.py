"""The small process between a launcher and its attempts: it starts them and leaves none behind.

It is a subreaper, so every orphan of an attempt becomes its child, whatever session, environment or
process group the orphan gave itself. When the launcher is gone, it asks the attempts to stop, gives
them time for a last checkpoint and kills all that is left.

This file is run by itself in an interpreter without site-packages (15 ms, 10 MiB): it imports
nothing but the standard library. Its command line names neither the package nor the job, and its
name is not Python's, so that ``pkill -f robust_train`` or ``killall python3`` does not end it
together with the launcher that it has to clean up after.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Collection
from typing import Any

_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_RLIMIT_LOCKS = 10  # see `job_mark`
_KILL_SECONDS = 5.0  # a process may hang in the kernel
_LARGEST_PACKET = 1 << 16
_MOST_DESCRIPTORS = 5
_CHECK_MS = 1000
"""A fork of the launcher may keep the socket open, so the parent's id is checked as well."""


class Reaper:
    """Serves one launcher over a socket of packets.

    Packets are JSON objects. ``start`` comes with four descriptors (the command as a file in
    memory, and its standard streams) and a fifth that the command inherits.
    """

    def __init__(
        self,
        control: socket.socket,
        launcher: int,  # process id
        stop_signals: Collection[int],  # what may be sent to all processes of a job
        stop_signal: int,  # with which an attempt is asked to stop
        grace_seconds: float,  # for a last checkpoint when the launcher is gone
    ) -> None:
        self._control = control
        self._stop_signals = stop_signals
        self._stop_signal = stop_signal
        self._grace_seconds = grace_seconds
        self._launcher = launcher
        self._started: set[int] = set()

    def serve(self) -> None:
        """Serve until the launcher is gone, then end everything."""
        wakeup, wakeup_there = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup_there, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wakeup, select.POLLIN)
        with contextlib.suppress(OSError):
            while os.getppid() == self._launcher:
                ready = {descriptor for descriptor, _ in poll.poll(_CHECK_MS)}
                with contextlib.suppress(BlockingIOError):
                    os.read(wakeup, 4096)
                self._collect()
                if self._control.fileno() in ready:
                    data, descriptors, _, _ = socket.recv_fds(
                        self._control,
                        _LARGEST_PACKET,
                        _MOST_DESCRIPTORS,
                    )
                    if not data:
                        break
                    self._handle(json.loads(data), descriptors)
        self._end()

    def _handle(
        self,
        message: dict[str, Any],
        descriptors: list[int],
    ) -> None:
        if "start" in message:
            self._start(descriptors)
        elif "signal" in message and message["pid"] in self._started:
            os.kill(message["pid"], message["signal"])
        elif "mark" in message:
            for pid in (0, *self._started):
                _mark(pid, message["mark"])
        elif "kill_all_but" in message:
            self._send({"left": self._kill_all_but(message["kill_all_but"])})

    def _start(self, descriptors: list[int]) -> None:
        """Start a command in a session of its own, with the stop signals blocked.

        A signal that comes before it can handle them is then pending instead of fatal.
        """
        file, *streams, channel = descriptors
        for descriptor in descriptors:
            os.set_inheritable(descriptor, descriptor == channel)
        with open(file) as command:
            wanted = json.load(command)
        argv = [*wanted["argv"], str(channel)]
        try:
            pid = os.posix_spawn(
                argv[0],
                argv,
                wanted["environ"],
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, stream, number)
                    for number, stream in enumerate(streams)
                ],
                setsid=True,
                setsigmask=self._stop_signals,
            )
            self._started.add(pid)
            self._send({"started": pid})
        except OSError as error:
            self._send({"started": None, "errno": error.errno, "error": str(error)})
        for descriptor in (*streams, channel):
            os.close(descriptor)

    def _collect(self) -> None:
        """Collect dead children; report those that were asked for."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self._started:
                    self._started.discard(pid)
                    self._send(
                        {
                            "ended": pid,
                            "returncode": os.waitstatus_to_exitcode(status),
                            "max_resident_bytes": usage.ru_maxrss * 1024,
                        }
                    )

    def _send(self, message: dict[str, Any]) -> None:
        # the launcher is gone, which is seen by the loop
        with contextlib.suppress(OSError):
            self._control.send(json.dumps(message).encode())

    def _end(self) -> None:
        """Let the attempts save what they can, then end them with all that they started."""
        for pid in self._started:
            os.kill(pid, self._stop_signal)
        deadline = time.monotonic() + self._grace_seconds
        while self._started and time.monotonic() < deadline:
            self._collect()
            time.sleep(0.02)
        self._kill_all_but(())

    def _kill_all_but(self, kept: Collection[int]) -> list[int]:
        """Kill and collect all descendants except ``kept`` and theirs; return what is left."""
        deadline = time.monotonic() + _KILL_SECONDS
        pause = 0.002
        while True:
            left = _descendants(os.getpid(), kept)
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self._collect()
            if not left or time.monotonic() >= deadline:
                return left
            time.sleep(pause)
            pause = min(2 * pause, 0.1)


def _descendants(root: int, without: Collection[int]) -> list[int]:
    """Return the living descendants of a process, leaving out ``without`` and theirs."""
    children: dict[int, list[int]] = {}
    zombies = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            children.setdefault(int(parent), []).append(int(name))
            if state in (b"Z", b"X"):
                zombies.add(int(name))
    found, parents = [], [root]
    while parents:
        own = [pid for pid in children.get(parents.pop(), ()) if pid not in without]
        parents += own
        found += [pid for pid in own if pid not in zombies]
    return found


def _mark(pid: int, mark: int) -> None:
    # the administrator may have set a lower limit
    with contextlib.suppress(OSError, ValueError):
        _, most = resource.prlimit(pid, _RLIMIT_LOCKS)
        resource.prlimit(
            pid,
            _RLIMIT_LOCKS,
            (mark, most),
        )


def main() -> None:
    """Run as ``python -I -S reaper.py CONTROL LAUNCHER MARK STOP_SIGNAL GRACE SIGNAL…``."""
    control, launcher, mark, stop_signal, grace_seconds, *stop_signals = sys.argv[1:]
    _mark(0, int(mark))
    blocked = [int(one) for one in stop_signals]
    for signum in blocked:
        # a handler, not SIG_IGN: a command that is started gets the default action back
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
    # kernels and sandboxes without it lose a safety net, not the function
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(_PR_SET_NAME, b"job-reaper", 0, 0, 0)
    channel = socket.socket(fileno=int(control))
    channel.set_inheritable(False)
    Reaper(
        channel,
        int(launcher),
        blocked,
        int(stop_signal),
        float(grace_seconds),
    ).serve()


if __name__ == "__main__":
    main()
    os._exit(0)
