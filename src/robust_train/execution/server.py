"""The fork server from the inside: import libraries once, fork an attempt at a time.

Started by :mod:`.fork_server` in a session of its own, so that a terminal's Ctrl-C reaches only the
launcher. It ends when the launcher does. Signals do not end it: one that is sent to all processes
of a job is for the attempt, which has to save first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import NoReturn

from robust_train.compat import run_exit_handlers
from robust_train.errors import ConfigError
from robust_train.execution import linux, signals
from robust_train.execution.attempt_output import flush_output
from robust_train.execution.fork_guard import threads, why_not_fork
from robust_train.execution.fork_messages import Exited, Import, Imported, receive_descriptors
from robust_train.execution.hydra_state import adopt_hydra
from robust_train.execution.request import AttemptRequest
from robust_train.execution.runner import new_run, run_attempt, stop_on_signals
from robust_train.execution.wire import EventSender
from robust_train.failures.shortage import no_room_to_import


def main() -> None:
    """Serve one launcher, which has started this process with the stop signals blocked."""
    handled = [one for one in signals.STOP_SIGNALS if signal.getsignal(one) != signal.SIG_IGN]
    for signum in handled:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOP_SIGNALS)
    control, events = (int(number) for number in sys.argv[1:3])
    sys.argv[:] = sys.argv[3:]  # the launcher's: a script may parse them where it is imported
    for descriptor in (control, events):
        os.set_inheritable(descriptor, False)
    linux.become_subreaper()
    _Server(Connection(control), socket.socket(fileno=events), handled).serve()
    os._exit(0)  # taking torch down in good order takes time, and nobody needs it


class _Server:
    """Serves one launcher (see :mod:`.fork_messages`)."""

    def __init__(
        self, control: Connection, events: socket.socket, handled: Sequence[signal.Signals]
    ) -> None:
        self._control = control
        self._events = events
        self._handled = handled
        self._threads = threads()
        self._child: int | None = None

    def serve(self) -> None:
        """Serve until the launcher is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with signals.wakeup_descriptor() as wakeup, contextlib.suppress(EOFError, ConnectionError):
            while True:
                ready = wait([self._control, wakeup])
                with contextlib.suppress(BlockingIOError):
                    os.read(wakeup, 4096)
                self._reap()
                if self._control in ready:
                    self._handle(self._control.recv())
        self._end_orphan()

    def _handle(self, message: object) -> None:
        if isinstance(message, Import):
            # an import may take for ever, and a launcher that has died is not seen meanwhile
            linux.signal_at_parents_death(signal.SIGKILL)
            imported = self._import(message)
            linux.signal_at_parents_death(0)
            self._control.send(imported)
        elif isinstance(message, AttemptRequest):
            hold = receive_descriptors(self._control)
            self._fork(message, hold)
            for descriptor in hold:
                os.close(descriptor)
        elif isinstance(message, int) and self._child is not None:
            os.kill(self._child, message)

    def _import(self, wanted: Import) -> Imported:
        """Import libraries; find out after each whether forks are still possible."""
        sys.path[:] = wanted.path
        unsafe: dict[str, str] = {}
        names = list(wanted.libraries)
        try:
            if wanted.trainer is not None:
                module = wanted.trainer.path.rpartition(".")[0]
                _import_one(module)
                preload = getattr(sys.modules.get(module), "preload_modules", None)
                names += [] if preload is None else preload(wanted.cfg)
            for name in names:
                _import_one(name)
                reason = None if unsafe else why_not_fork(self._threads)
                if reason is not None:
                    unsafe[name] = reason
        except ConfigError as error:
            return Imported(unsafe, str(error))
        except OSError as error:  # not even the threads can be counted
            return Imported(unsafe, no_room_to_import("torch", error) or str(error))
        # none of it becomes garbage: attempts need not look through it, nor copy its pages
        gc.freeze()
        return Imported(unsafe)

    def _fork(self, request: AttemptRequest, hold: Sequence[int]) -> None:
        server = os.getpid()
        # a signal that comes before the attempt's own handlers must not be lost
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOP_SIGNALS)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for signum in (signal.SIGCHLD, *self._handled):
                signal.signal(signum, signal.SIG_DFL)
            os.setpgid(0, 0)
            linux.signal_at_parents_death(signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            self._control.close()
            _be_attempt(request, EventSender(self._events), hold)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._child = pid

    def _reap(self) -> None:
        """Collect dead children; with the attempt itself goes everything that it left running."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._child:
                    self._child = None
                    linux.kill_descendants()
                    code = os.waitstatus_to_exitcode(status)
                    self._control.send(Exited(pid, code, usage.ru_maxrss * 1024))

    def _end_orphan(self) -> None:
        """Let the attempt save what it can, then end it: the launcher is gone."""
        if self._child is not None:
            os.kill(self._child, signals.stop_signal(os.environ))
            deadline = time.monotonic() + signals.ORPHAN_GRACE_SECONDS
            while time.monotonic() < deadline and not os.waitpid(self._child, os.WNOHANG)[0]:
                time.sleep(0.02)
        linux.kill_descendants()


def _import_one(name: str) -> None:
    """Import a module, or nothing if it is an attribute of one. What fails will fail in the attempt
    as well, and is reported there. Raises ConfigError: a limit of this process leaves no room for
    it."""
    parent, _, attribute = name.rpartition(".")
    try:
        if not hasattr(sys.modules.get(parent), attribute):
            importlib.import_module(name)
    except Exception as error:
        if (problem := no_room_to_import(name, error)) is not None:
            raise ConfigError(problem) from error


def _write_stacks(request: AttemptRequest) -> None:
    """Have the stacks of a crash or a stall written; not on the screen, which gets a line."""
    try:
        stacks = request.stacks_file.open("a")
    except OSError:  # a full disk, perhaps
        faulthandler.enable()
        return
    faulthandler.enable(stacks)
    faulthandler.register(signals.DUMP_STACKS, file=stacks)


def _be_attempt(request: AttemptRequest, send: EventSender, hold: Sequence[int]) -> NoReturn:
    """Run the attempt in this process, which was forked for it."""
    status = 1
    try:
        marker = os.environ.get(linux.JOB_MARKER, "")
        os.environ.clear()
        os.environ.update({**request.environ, linux.JOB_MARKER: marker})
        os.chdir(request.cwd)
        _write_stacks(request)
        adopt_hydra(request.hydra_cfg)
        importlib.invalidate_caches()
        if request.world_size > 1:
            # it brings much of torch along that one process does without
            from robust_train.execution.rank_group import run_ranks

            status = run_ranks(request, send, hold)
        else:
            error = run_attempt(
                request,
                new_run(request, send),
                request.trainer.load,
                send,
                stopping=partial(stop_on_signals, is_script=request.runs_script),
                process_ends=True,
            )
            status = int(error is not None)
        send.flush()
        # what a normal interpreter exit would do, without the server's own frames above us
        flush_output()
        run_exit_handlers()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        flush_output()
        send.flush()
        os._exit(status)
