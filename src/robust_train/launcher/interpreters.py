"""The interpreters of a job: started early, and always through the job's :mod:`.reaper`.

Why plain interpreters: see ``docs/decisions/0002-plain-interpreters.md``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from robust_train.compat import base_executable
from robust_train.config.attempt import Begin, Preparation
from robust_train.folder import trackers
from robust_train.host import reaper
from robust_train.host.linux import (
    TICK_SECONDS,
    become_subreaper,
    job_mark,
    kill_descendants,
    mark_of,
    readable,
    shared_machine_environment,
)
from robust_train.host.signals import ORPHAN_GRACE_SECONDS, STOP_SIGNALS, stop_signal
from robust_train.host.wire import read_events
from robust_train.launcher.attempt_output import OutputPump
from robust_train.model.events import Event, Prepared

log = logging.getLogger("robust_train")

_LARGEST_PACKET = 1 << 16
_REPLY_SECONDS = 60.0
_AFTER_KILL_SECONDS = 8.0
_QUIET_SECONDS = 0.5

# what an attempt can still change after libraries were imported, and what none of them reads
_NOT_READ_AT_IMPORT = (
    "HYDRA_",
    "ROBUST_TRAIN_",
    "NCCL_",
    "TORCH_NCCL_",
    "TORCH_FR_",
    "CUBLAS_",
    "SLURM_",
    "SUBMITIT_",
)
_SET_FOR_EACH_ATTEMPT = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "COLUMNS",
        "LINES",
        *trackers.VARIABLES,
    }
)
_ALLOCATORS = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
)


class ReaperDied(Exception):
    """The reaper ended by itself, and with it the attempt. ``returncode`` as subprocess has it."""

    def __init__(self, returncode: int) -> None:
        super().__init__(f"the attempts' reaper ended with {returncode}")
        self.returncode = returncode


class Interpreter:
    """One plain interpreter, from its start to its end.

    Attributes:
        returncode: how it ended, as subprocess has it; None while it runs.
        max_resident_bytes: its peak resident memory, once it has ended.
        is_asked: it was given something to import.
        is_begun: it was given its attempt.
        refusal: why the trainer does not accept the config, None if it does.
        is_unfit: it can run no attempt: an import of its has started CUDA.
    """

    def __init__(
        self,
        pid: int,
        channel: socket.socket,
        environ: Mapping[str, str],
    ) -> None:
        self.pid = pid
        self.channel = channel
        self.returncode: int | None = None
        self.max_resident_bytes = 0
        self.refusal: str | None = None
        self.is_unfit = self.is_asked = self.is_begun = False
        self._read_at_import = _read_at_import(environ)
        self._answers_due = 0

    @property
    def is_running(self) -> bool:
        """Whether its process has not ended."""
        return self.returncode is None

    @property
    def is_prepared(self) -> bool:
        """Whether it has imported what it was given to import."""
        return self._answers_due == 0

    def suits(self, environ: Mapping[str, str]) -> bool:
        """Return whether it can still run an attempt with this environment."""
        is_same = self._read_at_import == _read_at_import(
            shared_machine_environment(environ)
        )
        return is_same and self.is_running and not self.is_unfit

    def prepare(self, wanted: Preparation) -> None:
        """Have it import modules; it breaks off an earlier preparation for this one."""
        self.is_asked = True
        self._answers_due += 1
        self._send(wanted)

    def begin(
        self,
        begin: Begin,
        descriptors: Sequence[int],
    ) -> None:
        """Give it its attempt, with copies of open descriptors."""
        self.is_begun = True
        self._send(begin, descriptors)

    def read(self, most: int | None = None) -> Iterator[Event]:
        """Yield the events of its attempt that have arrived; handle its own answers."""
        for event in read_events(self.channel, most):
            if not isinstance(event, Prepared):
                yield event
                continue
            self._answers_due -= 1
            self.refusal = self.refusal or event.refusal
            self.is_unfit |= event.is_unfit

    def _send(
        self,
        message: Preparation | Begin,
        descriptors: Sequence[int] = (),
    ) -> None:
        with os.fdopen(os.memfd_create("message"), "wb") as file:
            pickle.dump(message, file)
            file.flush()
            with contextlib.suppress(OSError):  # it has ended, which the reaper reports
                socket.send_fds(
                    self.channel,
                    [b"\0"],
                    [file.fileno(), *descriptors],
                )


class Interpreters:
    """The interpreters of one job, the process that starts them, and what they print.

    Attributes:
        pump: takes what they print.
    """

    def __init__(self) -> None:
        self.pump = OutputPump()
        self.running: dict[int, Interpreter] = {}
        self._owner = os.getpid()
        self._job = os.urandom(3).hex()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # what the reaper leaves behind if it is killed becomes ours to end
        _alive.add(self)
        become_subreaper()
        with theirs, open(reaper.__file__, "rb") as program:
            # a signal to all processes of the job must not end it before it can handle them
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            try:
                self._process = subprocess.Popen(
                    [
                        base_executable(),
                        "-I",
                        "-S",
                        f"/dev/fd/{program.fileno()}",
                        str(theirs.fileno()),
                        str(self._owner),
                        str(job_mark(self._job)),
                        str(int(stop_signal(os.environ))),
                        str(ORPHAN_GRACE_SECONDS),
                        *(str(int(signum)) for signum in STOP_SIGNALS),
                    ],
                    pass_fds=(theirs.fileno(), program.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=self.pump.stdout.child_fd,
                    stderr=self.pump.stderr.child_fd,
                    start_new_session=True,
                    env=dict(os.environ),
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    @property
    def is_alive(self) -> bool:
        """Whether the reaper runs, so that interpreters can be started."""
        return self._process.poll() is None

    @property
    def descriptors(self) -> list[int]:
        """What becomes readable when the reaper reports or an interpreter prints something."""
        return [
            self.control.fileno(),
            *(stream.read_fd for stream in self.pump.streams),
        ]

    def start(self, environ: Mapping[str, str]) -> Interpreter:
        """Start an interpreter in an environment.

        Raises:
            ReaperDied: the reaper has ended.
            OSError: the system starts no process.
        """
        environ = shared_machine_environment(environ)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        program = str(Path(__file__).parents[1] / "attempt" / "__main__.py")
        command = {
            "argv": [sys.executable, program, str(self._process.pid)],
            "environ": environ,
        }
        nothing = os.open(os.devnull, os.O_RDONLY)
        with theirs, os.fdopen(os.memfd_create("command"), "w+") as file:
            json.dump(command, file)
            file.seek(0)
            stdin = self.pump.input_fd
            stdin = nothing if stdin is None else stdin
            streams = (stdin, self.pump.stdout.child_fd, self.pump.stderr.child_fd)
            self._request({"start": True}, (file.fileno(), *streams, theirs.fileno()))
            reply = self._reply("started")
        os.close(nothing)
        if reply["started"] is None:
            raise OSError(reply["errno"], reply["error"])
        one = Interpreter(reply["started"], ours, environ)
        self.running[one.pid] = one
        return one

    def mark(self, job: str) -> None:
        """Have all processes of the job show its id, by which others recognize them."""
        self._job = job
        self._request({"mark": job_mark(job)})

    def signal(
        self,
        one: Interpreter,
        signum: int,
    ) -> None:
        """Send a signal to an interpreter that may have ended."""
        self._request({"signal": int(signum), "pid": one.pid})

    def poll(self, seconds: float = 0.0) -> None:
        """Read what the reaper reports: :attr:`Interpreter.returncode` is set then."""
        while readable([self.control.fileno()], seconds):
            seconds = 0.0
            self._on_message(self._receive())

    def kill_leftovers(self, kept: Sequence[Interpreter]) -> list[int]:
        """Kill all but these interpreters and what they started; return what cannot be killed."""
        self._request({"kill_all_but": [one.pid for one in kept]})
        left: list[int] = self._reply("left")["left"]
        return left

    def end(self, one: Interpreter) -> None:
        """End an interpreter that is no longer needed."""
        self.signal(one, signal.SIGKILL)
        self.forget(one)

    def forget(self, one: Interpreter) -> None:
        """Release an interpreter that has ended or is given up."""
        self.running.pop(one.pid, None)
        one.channel.close()

    def close(self) -> None:
        """End all interpreters; in a fork of this process close its descriptors only."""
        if self.control.fileno() < 0:  # closed
            return
        is_owner, was_killed = os.getpid() == self._owner, not self.is_alive
        with contextlib.suppress(ReaperDied):
            for one in self.running.values() if is_owner else ():
                if one.is_running:
                    self.signal(one, signal.SIGKILL)
        self.control.close()
        for one in self.running.values():
            one.channel.close()
        if is_owner:
            self._end_reaper()
            # what the reaper could not end itself
            quiet_seconds = _QUIET_SECONDS if was_killed else 0.0
            mark = job_mark(self._job)
            left = kill_descendants(
                lambda process: mark_of(process.pid) == mark,
                quiet_seconds=quiet_seconds,
            )
            if left:
                log.warning("processes %s of the attempt cannot be ended", left)
            _alive.discard(self)
            if not _alive:
                become_subreaper(on=False)
        self.pump.close()

    def _end_reaper(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ORPHAN_GRACE_SECONDS + _AFTER_KILL_SECONDS)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_AFTER_KILL_SECONDS)

    def _request(
        self,
        message: Mapping[str, object],
        descriptors: Sequence[int] = (),
    ) -> None:
        try:
            socket.send_fds(
                self.control,
                [json.dumps(message).encode()],
                list(descriptors),
            )
        except OSError as error:
            raise self._death() from error

    def _reply(self, name: str) -> dict[str, Any]:
        """Wait for the reaper's reply to a request."""
        while readable([self.control.fileno()], _REPLY_SECONDS):
            message = self._receive()
            if name in message:
                return message
            self._on_message(message)
        raise self._death()

    def _receive(self) -> dict[str, Any]:
        data = b""
        with contextlib.suppress(OSError):
            data = self.control.recv(_LARGEST_PACKET)
        if not data:
            raise self._death()
        message: dict[str, Any] = json.loads(data)
        return message

    def _on_message(self, message: Mapping[str, Any]) -> None:
        one = self.running.get(message.get("ended", 0))
        if one is not None:
            one.returncode = message["returncode"]
            one.max_resident_bytes = message["max_resident_bytes"]

    def _death(self) -> ReaperDied:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_AFTER_KILL_SECONDS)
        return ReaperDied(self._process.poll() or -signal.SIGKILL)


_alive: set[Interpreters] = set()
"""Those of this process that are not closed."""


def wait_until_prepared(
    interpreters: Interpreters,
    waited_for: Sequence[Interpreter],
    tick: Callable[[], None],
) -> None:
    """Wait until interpreters have answered or ended, calling ``tick`` twice a second."""
    while pending := [
        one for one in waited_for if one.is_running and not one.is_prepared
    ]:
        channels = [one.channel.fileno() for one in pending]
        readable([*interpreters.descriptors, *channels], TICK_SECONDS)
        interpreters.poll()
        interpreters.pump.move()
        for one in pending:
            list(one.read())
        tick()


_at_hand: list[Interpreters] = []


def start_early(modules: Sequence[str] = ()) -> None:
    """Start an interpreter for this process's next job, before it is known what it will run."""
    with contextlib.suppress(OSError, ReaperDied):  # the job reports it
        interpreters = Interpreters()
        one = interpreters.start(os.environ)
        one.prepare(preparation(modules))
        _at_hand.append(interpreters)


def take_early() -> Interpreters:
    """Return the interpreters that were started early, else none yet."""
    while _at_hand:
        found = _at_hand.pop()
        if found.is_alive:
            return found
        found.close()
    return Interpreters()


def discard_early() -> None:
    """End what was started early; in a fork of this process, forget its parent's."""
    while _at_hand:
        _at_hand.pop().close()


def preparation(modules: Sequence[str], *, is_standby: bool = False) -> Preparation:
    """Return what an interpreter of this process's jobs does first."""
    return Preparation(
        path=tuple(os.path.abspath(entry) for entry in sys.path),
        argv=tuple(sys.argv),
        modules=tuple(modules),
        is_standby=is_standby,
    )


def _read_at_import(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a library may read when it is imported."""
    read = {
        name: value
        for name, value in environ.items()
        if not name.startswith(_NOT_READ_AT_IMPORT)
        and name not in _SET_FOR_EACH_ATTEMPT
    }
    for name in _ALLOCATORS:  # of their settings that is only the backend
        read[name] = read.get(name, "").partition("backend:")[2].partition(",")[0]
    return read
