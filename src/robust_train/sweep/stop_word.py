"""How a sweep's jobs hear that it is to end, where a launcher of others runs them on this host.

Interrupted, joblib kills its workers and submitit leaves its jobs running. So the process in which
the sweep was typed has a socket open that the jobs' processes connect to. At Ctrl-C or SIGTERM it
sends them the signal's number, and lets the launcher know only when every job has hung up: then it
has written its checkpoint and its record. When it dies itself, the kernel hangs up for it, and that
is a word to stop as well. The socket has an abstract name, so there is no file that could be left
behind, and nobody on another host or in another network namespace can take it for theirs.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from robust_train.errors import JobInterrupted
from robust_train.execution.signals import UNDER_SUBMITIT, stop_job
from robust_train.queue.queue_dir import boot_name

VARIABLE = "ROBUST_TRAIN_SWEEP_STOP_WORD"
"""Where the socket is and what it is called, for the jobs' processes."""

LAUNCHERS = ("joblib", "submitit_local")
"""Those that run jobs on this host, in processes of their own, and do not see to their ends."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MOST_WAITING = 4096  # the kernel's own limit, net.core.somaxconn
_FAREWELL = 0
_CONTROLLER = b"submitit.local._local"


class StopWord:
    """The sweep's end of it, from its first job until :meth:`close`.

    Only the main thread can be told of signals; in another one the jobs hear of this process's
    death alone.

    Args:
        sweep: id of this launch of the sweep.

    Raises:
        OSError: there are no such sockets here.
    """

    def __init__(self, sweep: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_address(sweep))
        self._listener.listen(_MOST_WAITING)
        self._listener.setblocking(False)
        self._jobs: list[socket.socket] = []
        self._signum: int | None = None
        self._previous: dict[int, Any] = {}
        os.environ[VARIABLE] = f"{_place()} {sweep}"
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                if signal.getsignal(signum) not in (signal.SIG_IGN, None):
                    self._previous[signum] = signal.signal(signum, self._on_signal)

    def close(self) -> None:
        """Stop listening, when all jobs have ended; their processes may have other things to do."""
        for signum, previous in self._previous.items():
            signal.signal(signum, previous)
        self._previous = {}
        os.environ.pop(VARIABLE, None)
        with selectors.DefaultSelector() as selector:
            self._welcome(selector, _FAREWELL)
        for connection in (self._listener, *self._jobs):
            connection.close()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._signum is not None:  # while the first call waits, further down the stack
            self._tell(self._jobs, signal.SIGKILL)
            return
        self._signum = signum
        # a terminal's Ctrl-C reaches them too, and a second later they would kill their jobs
        controllers = _submitit_controllers()
        _send(controllers, signal.SIGSTOP)
        self._wait_for_jobs(signum)
        _send(controllers, signal.SIGKILL)
        raise JobInterrupted(signum)

    def _wait_for_jobs(self, signum: int) -> None:
        """Tell every job, those that come late too, and wait until the last one hung up."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            self._welcome(selector, signum)
            if self._jobs:
                # not through the buffers, which the code that was interrupted may be writing to
                os.write(2, b"stopping: jobs save their checkpoints; once more kills them\n")
            while self._jobs:
                for key, _ in selector.select():
                    if key.fileobj is self._listener:
                        self._welcome(selector, signum)
                    elif isinstance(key.fileobj, socket.socket) and _has_hung_up(key.fileobj):
                        selector.unregister(key.fileobj)
                        self._jobs.remove(key.fileobj)
                        key.fileobj.close()

    def _welcome(self, selector: selectors.BaseSelector, signum: int) -> None:
        while True:
            try:
                job, _ = self._listener.accept()
            except BlockingIOError:
                return
            selector.register(job, selectors.EVENT_READ)
            self._jobs.append(job)
            self._tell([job], signum)

    def _tell(self, jobs: list[socket.socket], signum: int) -> None:
        for job in jobs:
            try:
                job.send(bytes([signum]), socket.MSG_DONTWAIT)
            except OSError:
                continue  # it has hung up, which is seen next


class _Ear:
    """A job process's end of it, for all jobs that it runs one after the other."""

    def __init__(self, connection: socket.socket) -> None:
        self.pid = os.getpid()
        self.is_told = False
        self._is_orphan = False
        self._is_at_work = False
        self._connection = connection
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="stop_word", daemon=True).start()

    def job_starts(self) -> bool:
        with self._lock:
            self._is_at_work = not self.is_told
            return self._is_at_work

    def job_ended(self) -> None:
        with self._lock:
            self._is_at_work = False
            self._after_the_last_job()

    def _listen(self) -> None:
        while True:
            try:
                word = self._connection.recv(1)
            except OSError:
                word = b""
            signum = word[0] if word else signal.SIGTERM
            if signum == _FAREWELL:
                self._connection.close()
                return
            if signum == signal.SIGKILL:
                os.kill(os.getpid(), signal.SIGKILL)
            with self._lock:
                self._is_orphan = not word and not self.is_told
                is_new, self.is_told = not self.is_told, True
                self._after_the_last_job()
                is_at_work = self._is_at_work
            if is_new and is_at_work:
                stop_job(signum)
            if not word:
                return

    def _after_the_last_job(self) -> None:
        if self._is_at_work or not self.is_told:
            return
        if self._is_orphan:
            os._exit(0)  # a worker of joblib's would wait five minutes for more to do
        self._hang_up()

    def _hang_up(self) -> None:
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end was first


_ear: _Ear | None = None


def job_starts() -> bool:
    """Say that a job of a sweep starts in this process; False where the sweep is being stopped."""
    global _ear
    place, _, sweep = os.environ.get(VARIABLE, "").partition(" ")
    if not sweep or place != _place():
        return True
    if _ear is None or _ear.pid != os.getpid():
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.connect(_address(sweep))
        except ConnectionRefusedError:
            return False  # the sweep's process is gone
        except OSError:
            return True  # too many wait to be heard
        connection.setblocking(True)
        if UNDER_SUBMITIT in os.environ and threading.current_thread() is threading.main_thread():
            # a terminal's would come twice, once through the controller, and a second one kills
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        _ear = _Ear(connection)
    return _ear.job_starts()


def job_ended() -> None:
    """Say that the job which started in this process has ended, with all that it has to write."""
    if _ear is not None and _ear.pid == os.getpid():
        _ear.job_ended()


def _submitit_controllers() -> list[int]:
    """Children of this process that submitit has put between it and its jobs."""
    found = []
    for thread in Path("/proc/self/task").iterdir():
        for pid in (thread / "children").read_text().split():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if _CONTROLLER in command:
                found.append(int(pid))
    return found


def _send(pids: list[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def _has_hung_up(job: socket.socket) -> bool:
    try:
        return not job.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _address(sweep: str) -> str:
    return f"\0robust-train-sweep-{sweep}"


def _place() -> str:
    """Where the names of sockets are the same as here: this boot, this network namespace."""
    try:
        return f"{boot_name()}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return "unknown"
