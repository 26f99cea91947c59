"""The fork server from the inside: import libraries once, fork an attempt at a time."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator

from robust_train.compat import run_exit_handlers
from robust_train.errors import ConfigError
from robust_train.execution.fork_guard import ForkGuard
from robust_train.execution.fork_messages import Exited, Fork, Import, Imported, Refused, Signal
from robust_train.execution.hydra_state import adopt_hydra
from robust_train.execution.linux import JOB_MARKER, kill_descendants, signal_at_parents_death
from robust_train.execution.output import flush_output
from robust_train.execution.request import AttemptRequest
from robust_train.execution.runner import run_attempt, stop_on_signals
from robust_train.execution.signals import STOP_SIGNALS, stop_signal
from robust_train.execution.stall import DUMP_STACKS
from robust_train.execution.wire import (
    ORPHAN_GRACE_SECONDS,
    EventSender,
    MessageReader,
    send_message,
)
from robust_train.run import Run


class Server:
    """Serves one launcher over its control socket (see :mod:`.fork_messages`).

    Args:
        control: messages in both directions.
        events: where attempts send their events.
        ignored: signals that this process ignored from its start, as under ``nohup``.
    """

    def __init__(
        self, control: socket.socket, events: socket.socket, ignored: list[signal.Signals]
    ) -> None:
        self._control = control
        self._events = events
        self._ignored = ignored
        self._reader = MessageReader(control)
        self._guard = ForkGuard()
        self._child: int | None = None

    def serve(self) -> None:
        """Until the launcher is gone."""
        with _woken_by_children() as wakeup, selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(wakeup, selectors.EVENT_READ)
            while not self._reader.closed:
                selector.select()
                with contextlib.suppress(BlockingIOError):
                    os.read(wakeup, 4096)
                self._reap()
                for message in self._reader.read():
                    self._handle(message)
        self._end_orphan()

    def _handle(self, message: object) -> None:
        if isinstance(message, Import):
            self._import(message)
        elif isinstance(message, Fork):
            self._fork(message.request)
        elif isinstance(message, Signal) and self._child is not None:
            os.kill(self._child, message.signum)

    def _import(self, wanted: Import) -> None:
        """Import libraries; find out after each whether forks are still possible."""
        sys.path[:] = wanted.path
        unsafe: dict[str, str] = {}
        names = list(wanted.libraries)
        if wanted.trainer is not None:
            module = wanted.trainer.path.rpartition(".")[0]
            _import_one(module)
            preload = getattr(sys.modules.get(module), "preload_modules", None)
            try:
                names += [] if preload is None else preload(wanted.cfg)
            except ConfigError as error:
                send_message(self._control, Refused(str(error)))
                return
        for name in names:
            _import_one(name)
            reason = None if unsafe else self._guard.why_not_fork()
            if reason is not None:
                unsafe[name.partition(":")[0]] = reason
        # none of it becomes garbage: attempts need not look through it, nor copy its pages
        gc.freeze()
        send_message(self._control, Imported(unsafe))

    def _fork(self, request: AttemptRequest) -> None:
        server = os.getpid()
        # a signal that comes before the attempt's own handlers must not be lost
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for signum in STOP_SIGNALS:
                if signum not in self._ignored:
                    signal.signal(signum, signal.SIG_DFL)
            for descriptor in self._reader.descriptors:  # locks: what the attempt starts
                os.set_inheritable(descriptor, True)  # holds them as well
            os.setpgid(0, 0)
            signal_at_parents_death(signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            self._control.close()
            self._be_attempt(request)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        while self._reader.descriptors:
            os.close(self._reader.descriptors.pop())
        self._child = pid

    def _be_attempt(self, request: AttemptRequest) -> None:
        """Run the attempt; does not return."""
        status = 1
        send = EventSender(self._events)
        try:
            marker = os.environ.get(JOB_MARKER, "")
            os.environ.clear()
            os.environ.update({**request.environ, JOB_MARKER: marker})
            os.chdir(request.cwd)
            faulthandler.enable()
            if request.stall_timeout_seconds > 0:
                faulthandler.register(DUMP_STACKS, file=request.stacks_file.open("w"))
            adopt_hydra(request.hydra_cfg)
            importlib.invalidate_caches()
            if request.ranks > 1:
                # it brings much of torch along that one process does without
                from robust_train.execution.ranks import run_ranks

                status = run_ranks(request, send)
            else:
                status = self._run_alone(request, send)
            # what a normal interpreter exit would do, without the server's own frames above us
            flush_output()
            run_exit_handlers()
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            flush_output()
            send.flush()
            os._exit(status)

    def _run_alone(self, request: AttemptRequest, send: EventSender) -> int:
        run = Run(
            run_dir=request.run_dir,
            attempt=request.attempt,
            resume_checkpoint=request.resume_checkpoint,
            report=send,
        )
        error = run_attempt(
            request,
            run,
            request.trainer.load,
            send,
            stopping=stop_on_signals,
            process_ends=True,
        )
        send.flush()
        return int(error is not None)

    def _reap(self) -> None:
        """Collect dead children; with the attempt itself goes everything that it left running."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid != self._child:
                    continue
                self._child = None
                kill_descendants()
                code = os.waitstatus_to_exitcode(status)
                send_message(self._control, Exited(pid, code, usage.ru_maxrss * 1024))

    def _end_orphan(self) -> None:
        """The launcher is gone: let the attempt save what it can, then end it."""
        if self._child is not None:
            os.kill(self._child, stop_signal(os.environ))
            deadline = time.monotonic() + ORPHAN_GRACE_SECONDS
            while time.monotonic() < deadline:
                if os.waitpid(self._child, os.WNOHANG)[0] == self._child:
                    break
                time.sleep(0.02)
        kill_descendants()


def _import_one(name: str) -> None:
    """Import ``module``, or of ``module:attribute`` a submodule of that name.

    What fails will fail in the attempt as well, which says so.
    """
    module, _, attribute = name.partition(":")
    with contextlib.suppress(Exception):
        found = importlib.import_module(module)
        if attribute and not hasattr(found, attribute):
            importlib.import_module(f"{module}.{attribute}")


@contextlib.contextmanager
def _woken_by_children() -> Iterator[int]:
    """Yield a descriptor that becomes readable when a child ends."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        yield read_end
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(read_end)
        os.close(write_end)
