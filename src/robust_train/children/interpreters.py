"""The processes of a job's attempts: plain Python interpreters, which the launcher starts early.

``launcher.process`` uses :class:`Interpreters` in the launcher. An interpreter runs
:mod:`robust_train.attempt`: it first imports modules (:class:`Preparation`), and later gets its
attempt (:class:`Begin`). Another process, the reaper, ends all of them if the launcher is killed.
``docs/decisions/0002-plain-interpreters.md`` gives the reasons for this design.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from robust_train.children.attempt_output import OutputPump
from robust_train.compat import base_executable, interpreter_options
from robust_train.config.attempt import Begin, Preparation
from robust_train.host import reaper
from robust_train.host.linux import (
    TICK_SECONDS,
    become_subreaper,
    collect,
    job_mark,
    kill_descendants,
    list_children,
    set_mark,
    shared_machine_environment,
    wait_until_readable,
)
from robust_train.host.signals import ORPHAN_GRACE_SECONDS, STOP_SIGNALS, choose_stop_signal
from robust_train.host.wire import read_events, send_file
from robust_train.model.errors import ConfigError
from robust_train.model.events import Event, Prepared

log = logging.getLogger("robust_train")

_AFTER_KILL_SECONDS = 8.0

# Prefixes of variables that differ between attempts, and are set only there.
_CHANGED_BY_US = ("HYDRA_", "ROBUST_TRAIN_")


class Interpreter:
    """A plain interpreter, from its start to its end.

    Attributes:
        pid: its process id.
        channel: the connection to it.
        returncode: its return code as in subprocess. None while it runs.
        max_resident_bytes: its peak resident memory, once it has ended.
        is_asked: whether it got a request to import modules.
        is_begun: whether it got its attempt.
        is_unfit: whether it cannot run an attempt and ends, because an import has started CUDA.
        culprit: the module whose import started CUDA, empty if unknown.
        answers_due: the number of unfinished preparations.
    """

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self.pid = process.pid
        self.channel = channel
        self.returncode: int | None = None
        self.max_resident_bytes = 0
        self.is_asked = False
        self.is_begun = False
        self.is_unfit = False
        self.culprit = ""
        self.answers_due = 0
        self._process = process
        self._environ = _environ_for_imports()

    @property
    def is_running(self) -> bool:
        """Whether its process still runs."""
        return self.returncode is None

    def collect(self) -> None:
        """Set ``returncode`` if its process has ended."""
        pid = self.pid
        status = int(signal.SIGKILL)
        # If a signal handler of the user's program has collected the process, its status is lost.
        with contextlib.suppress(ChildProcessError):
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            self.max_resident_bytes = usage.ru_maxrss * 1024
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)
            self._process.returncode = self.returncode

    @property
    def is_usable(self) -> bool:
        """Whether it can run an attempt. It cannot if the user's program has changed the
        environment since the start, because its imports may depend on that."""
        is_same = self._environ == _environ_for_imports()
        return is_same and self.is_running and not self.is_unfit

    def prepare(self, wanted: Preparation) -> None:
        """Make the interpreter import modules. This interrupts an earlier preparation."""
        self.is_asked = True
        self.answers_due += 1
        self._send(wanted)

    def begin(self, begin: Begin, descriptors: Sequence[int]) -> None:
        """Send the interpreter its attempt, with copies of open descriptors."""
        self.is_begun = True
        self._send(begin, descriptors)

    def read(self, most: int = sys.maxsize) -> Iterator[Event]:
        """Yield the events of its attempt that have arrived, and handle its own answers.

        Raises:
            ConfigError: its trainer does not accept the config.
        """
        for event in read_events(self.channel, most):
            if not isinstance(event, Prepared):
                yield event
                continue
            self.answers_due -= 1
            self.is_unfit |= event.is_unfit
            self.culprit = self.culprit or event.culprit
            if event.refusal:
                raise ConfigError(event.refusal)

    def signal(self, signum: int) -> None:
        """Send a signal to the interpreter, unless it has ended."""
        if self.is_running:
            # A signal handler of the user's program may have collected it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def _send(self, message: Preparation | Begin, descriptors: Sequence[int] = ()) -> None:
        # If the interpreter has ended, `collect` finds that out.
        with contextlib.suppress(OSError):
            send_file(self.channel, pickle.dumps(message), descriptors)


class Interpreters:
    """The interpreters of a job, their output, and the reaper, which ends leftover processes if
    this process is killed.

    Attributes:
        pump: reads their output.
        running: the interpreters that are in use, by process id.
        is_open: whether interpreters can be started.
    """

    def __init__(self) -> None:
        self.pump = OutputPump()
        self.running: dict[int, Interpreter] = {}
        self.is_open = True
        self._owner = os.getpid()
        self._mark = -1
        self._uncollected: list[Interpreter] = []
        _open.add(self)
        # Orphaned descendants become children of this process, so that it can end them.
        become_subreaper()
        reader, self._reapers_pipe = os.pipe()
        with open(reader, "rb"), open(reaper.__file__, "rb") as file:
            arguments = [
                reader,
                self._owner,
                int(choose_stop_signal(os.environ)),
                ORPHAN_GRACE_SECONDS,
            ]
            arguments += [int(signum) for signum in STOP_SIGNALS]
            program = [base_executable(), "-I", "-S", f"/dev/fd/{file.fileno()}"]
            self._reaper = self._start(
                program + [str(argument) for argument in arguments],
                os.environ,
                (reader, file.fileno()),
                subprocess.DEVNULL,
            )
        self.mark(os.urandom(3).hex())

    @property
    def waiting(self) -> list[Interpreter]:
        """The interpreters that have no attempt yet."""
        return [interpreter for interpreter in self.running.values() if not interpreter.is_begun]

    def start(self) -> Interpreter:
        """Start an interpreter.

        Raises:
            OSError: the system cannot start a process.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        program = str(Path(__file__).parents[1] / "attempt" / "__main__.py")
        with theirs:
            channel = theirs.fileno()
            # The attempts get the same options. For example, -O removes the assert statements of
            # the launcher's program, and then those of the trainer too.
            command = [sys.executable] + interpreter_options()
            process = self._start(
                command + [program, str(self._owner), str(channel)],
                shared_machine_environment(os.environ),
                (channel,),
                self.pump.input_fd,
            )
        set_mark(process.pid, self._mark)
        self._send_to_reaper(f"i{process.pid}")
        interpreter = Interpreter(process, ours)
        self.running[interpreter.pid] = interpreter
        self._uncollected.append(interpreter)
        return interpreter

    def mark(self, job: str) -> None:
        """Mark all processes of the job with its id, so that they can be recognised later."""
        self._mark = job_mark(job)
        for pid in [self._reaper.pid] + list(self.running):
            set_mark(pid, self._mark)
        self._send_to_reaper(str(self._mark))

    def _send_to_reaper(self, word: str) -> None:
        with contextlib.suppress(OSError):  # The reaper may have been killed.
            os.write(self._reapers_pipe, f"{word}\n".encode())

    def poll(self) -> bool:
        """Collect interpreters that have ended, and pass on the output. Returns whether there was
        output."""
        for interpreter in self._uncollected:
            interpreter.collect()
        self._uncollected = [
            interpreter for interpreter in self._uncollected if interpreter.is_running
        ]
        return self.pump.move()

    def await_prepared(
        self, wanted: Sequence[Interpreter], tick: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until interpreters have answered or ended. Calls ``tick`` twice a second."""
        while True:
            pending = [
                interpreter
                for interpreter in wanted
                if interpreter.is_running and interpreter.answers_due
            ]
            if not pending:
                return
            channels = [interpreter.channel.fileno() for interpreter in pending]
            wait_until_readable(self.pump.descriptors + channels, TICK_SECONDS)
            self.poll()
            for interpreter in pending:
                # `read` handles the answers. Before its attempt, an interpreter has no events.
                list(interpreter.read())
            tick()

    def collect_orphans(self) -> None:
        """Collect orphaned descendants of interpreters that have ended. They are children of this
        process, because it is a subreaper."""
        pids = [interpreter.pid for interpreter in self._uncollected]
        for child in list_children():
            with contextlib.suppress(psutil.Error):
                has_ended = child.status() == psutil.STATUS_ZOMBIE
                if has_ended and child.pid not in pids and self._is_ours(child):
                    collect(child.pid)

    def kill_leftovers(self) -> list[int]:
        """Kill all processes of the job except the interpreters in use and their children. Returns
        the processes that cannot be killed."""
        spared = {self._reaper.pid} | self.running.keys()
        for pid in self.running:
            with contextlib.suppress(psutil.Error):
                descendants = psutil.Process(pid).children(recursive=True)
                spared.update(process.pid for process in descendants)

        def is_leftover(process: psutil.Process) -> bool:
            return process.pid not in spared and self._is_ours(process)

        return kill_descendants(is_leftover)

    def _is_ours(self, process: psutil.Process) -> bool:
        return reaper.mark_of(process.pid) == self._mark

    def end(self, interpreter: Interpreter) -> None:
        """End an interpreter that is no longer needed."""
        interpreter.signal(signal.SIGKILL)
        self.forget(interpreter)

    def forget(self, interpreter: Interpreter) -> None:
        """Release an interpreter that has ended or is given up."""
        self.running.pop(interpreter.pid, None)
        interpreter.channel.close()

    def close(self) -> None:
        """End all interpreters. In a fork of this process, only close its descriptors."""
        if not self.is_open:
            return
        self.is_open = False
        is_owner = os.getpid() == self._owner
        for interpreter in tuple(self.running.values()):
            if is_owner:
                interpreter.signal(signal.SIGKILL)
            self.forget(interpreter)
        if is_owner:
            left = self.kill_leftovers()
            if left:
                log.warning("processes %s of the attempt cannot be ended", left)
            self.poll()
            self._reaper.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._reaper.wait(_AFTER_KILL_SECONDS)
            _open.discard(self)
            if not _open:
                become_subreaper(on=False)
        os.close(self._reapers_pipe)
        self.pump.close()

    def _start(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        descriptors: Sequence[int],  # the descriptors that it inherits
        stdin: int,
    ) -> subprocess.Popen[bytes]:
        """Start a process in its own session. Stop signals are blocked in it, so that an early
        signal stays pending instead of ending the process."""
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return subprocess.Popen(
                command,
                pass_fds=descriptors,
                stdin=stdin,
                stdout=self.pump.stdout.child_fd,
                stderr=self.pump.stderr.child_fd,
                start_new_session=True,
                env=environ,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


_open: set[Interpreters] = set()
"""All objects of this process that are not closed. The last one that is closed ends the process's
role as a subreaper."""

_started_early: list[Interpreters] = []


def start_early(modules: Sequence[str] = ()) -> None:
    """Start an interpreter for this process's next job, before its trainer is known."""
    with contextlib.suppress(OSError):  # The job will report the error.
        interpreters = Interpreters()
        interpreters.start().prepare(request_imports(modules))
        _started_early.append(interpreters)


def take_early() -> Interpreters:
    """Return the interpreters that were started early, or an object without interpreters."""
    return _started_early.pop() if _started_early else Interpreters()


def discard_early() -> None:
    """End the interpreters that were started early. In a fork of the process that started them,
    only close their descriptors."""
    while _started_early:
        _started_early.pop().close()


def request_imports(modules: Sequence[str], *, is_standby: bool = False) -> Preparation:
    """Return a request to import modules, for an interpreter of this process's jobs."""
    return Preparation(
        path=tuple(os.path.abspath(entry) for entry in sys.path),
        argv=tuple(sys.argv),
        modules=tuple(modules),
        is_standby=is_standby,
    )


def _environ_for_imports() -> dict[str, str]:
    """Return the environment variables of this process that a library may read when it is
    imported, without the variables that only attempts get."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(_CHANGED_BY_US)
    }
