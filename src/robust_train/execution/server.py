"""The fork server from the inside: import torch and the trainer once, fork an attempt at a time."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from robust_train.errors import ConfigError
from robust_train.events import Event
from robust_train.execution.child import adopt_hydra, run_attempt, stop_on_sigterm
from robust_train.execution.cuda_guard import why_not_fork
from robust_train.execution.output import flush_output
from robust_train.execution.prctl import children, signal_at_parents_death
from robust_train.execution.request import AttemptRequest, TrainerRef
from robust_train.execution.stall import DUMP_STACKS
from robust_train.execution.wire import (
    ORPHAN_GRACE_SECONDS,
    MessageReader,
    send_event,
    send_message,
)
from robust_train.run import Run
from robust_train.runfolder.attempt_requests import AttemptRequests

_KILL_SECONDS = 5.0


class Server:
    """Serves one launcher over its control socket.

    Messages in: ``hello`` (the launcher's ``sys.path``, and whether to import torch now; for a fork
    of a zygote also its environment and working directory), ``share`` (become a zygote, which is
    asked over the socket that came with the message), ``load`` (a trainer), ``fork`` (run an
    attempt in a child, which keeps open the descriptors that came with the message), ``signal``,
    ``dump_stacks``, ``kill``.
    Messages out: ``loaded``, ``refused``, ``started``, ``exited``.

    Attributes:
        requests: the socket that came with ``share``, None before.
        unsafe: why an attempt must not be forked from here; None where that is safe or unknown.
    """

    def __init__(self, control: socket.socket, events: socket.socket) -> None:
        self._control = control
        self._events = events
        self._reader = MessageReader(control)
        self._trainer: Callable[..., Any] | None = None
        self._child: int | None = None
        self.requests: socket.socket | None = None
        self.unsafe: str | None = None

    def serve(self) -> None:
        """Until the launcher is gone or shares this process."""
        self._serve_until(lambda: self.requests is not None)
        if self.requests is None:
            self._end_orphan()

    def serve_until_loaded(self) -> bool:
        """Until a trainer is imported; False where that failed or the launcher went away before."""
        with contextlib.suppress(ConnectionError):  # it went away meanwhile
            self._serve_until(lambda: self._trainer is not None)
        return self._trainer is not None

    def close(self) -> None:
        """Let go of the launcher in this process; another one may serve it."""
        self._control.close()
        self._events.close()

    def _serve_until(self, is_done: Callable[[], bool]) -> None:
        with _woken_by_children() as wakeup, selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(wakeup, selectors.EVENT_READ)
            while not self._reader.closed and not is_done():
                selector.select()
                with contextlib.suppress(BlockingIOError):
                    os.read(wakeup, 4096)
                self._reap()
                for message in self._reader.read():
                    self._handle(message)

    def _handle(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "hello":
            sys.path[:] = message["path"]
            if message["environ"] is not None:  # this process was forked, not started
                os.environ.clear()
                os.environ.update(message["environ"])
                os.chdir(message["cwd"])
            if message["warm"]:
                with contextlib.suppress(ImportError):  # a trainer need not use torch
                    importlib.import_module("torch")
                # none of it becomes garbage: attempts need not look through it, nor copy its pages
                gc.freeze()
        elif kind == "share":
            self.requests = socket.socket(fileno=self._reader.descriptors.pop())
        elif kind == "load":
            self._load(message["trainer"], message["cfg"])
        elif kind == "fork":
            self._fork(message["request"])
        elif kind == "signal" and self._child is not None:
            os.kill(self._child, message["signum"])
        elif kind == "dump_stacks" and self._child is not None:
            os.kill(self._child, DUMP_STACKS)
        elif kind == "kill" and self._child is not None:
            os.kill(self._child, signal.SIGKILL)

    def _load(self, ref: TrainerRef, cfg: Any) -> None:
        """Import the trainer and what it will need; find out whether forks are still possible."""
        self.unsafe = None

        def blame(module: str) -> None:
            reason = why_not_fork()
            if self.unsafe is None and reason is not None:
                self.unsafe = f"{module} {reason}"

        blame("torch")
        try:
            module, self._trainer = ref.load()
            blame(module.__name__)
            preload = getattr(module, "preload_modules", None)
            names = list(preload(cfg)) if preload is not None else []
            if cfg is not None and cfg.get("num_gpus", 1) > 1:
                names.append("robust_train.execution.elastic")
            for name in names:
                with contextlib.suppress(ImportError):  # the trainer says itself what it lacks
                    importlib.import_module(name)
                blame(name)
        except ConfigError as error:
            send_message(self._control, {"kind": "refused", "reason": str(error)})
            return
        send_message(self._control, {"kind": "loaded", "unsafe": self.unsafe})

    def _fork(self, request: AttemptRequest) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in self._reader.descriptors:  # reservation and run folder's lock: what
                os.set_inheritable(descriptor, True)  # the attempt starts holds them as well
            os.setpgid(0, 0)
            signal_at_parents_death(signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            self._control.close()
            self._run(request)
        while self._reader.descriptors:
            os.close(self._reader.descriptors.pop())
        with contextlib.suppress(OSError):  # the child does it too: whoever comes first
            os.setpgid(pid, pid)
        self._child = pid
        send_message(self._control, {"kind": "started", "pid": pid})

    def _run(self, request: AttemptRequest) -> None:
        """Be the attempt; does not return."""
        status = 1
        try:
            os.environ.clear()
            os.environ.update(request.environ)
            os.chdir(request.cwd)
            faulthandler.enable()
            if request.stall_timeout_seconds > 0:
                faulthandler.register(DUMP_STACKS, file=request.stacks_file.open("w"))
            adopt_hydra(request.hydra_cfg)
            if request.ranks > 1:
                # it brings much of torch along that one process does without
                from robust_train.execution.elastic import run_ranks

                status = run_ranks(request, self._trainer, self._report)
            else:
                status = self._run_alone(request)
            # what a normal interpreter exit would do, without the server's own frames above us
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            flush_output()
            os._exit(status)

    def _run_alone(self, request: AttemptRequest) -> int:
        run = Run(
            run_dir=Path(request.run_dir),
            attempt=request.attempt,
            resume_checkpoint=request.resume_checkpoint,
            report=self._report_event,
        )
        stop_on_sigterm(run)
        trainer = self._trainer or request.trainer.load()[1]
        with AttemptRequests(run, run.run_dir):
            return 0 if run_attempt(request, trainer, run, self._report) is None else 1

    def _report(self, event: dict[str, Any]) -> None:
        send_event(self._events, event)

    def _report_event(self, event: Event) -> None:
        self._report(event.as_json())

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
                _kill_all(group=pid)
                send_message(
                    self._control,
                    {
                        "kind": "exited",
                        "pid": pid,
                        "returncode": os.waitstatus_to_exitcode(status),
                        "max_resident_bytes": usage.ru_maxrss * 1024,
                    },
                )

    def _end_orphan(self) -> None:
        """The launcher is gone: let the attempt save what it can, then end it."""
        child = self._child
        if child is None:
            return
        os.kill(child, signal.SIGTERM)
        deadline = time.monotonic() + ORPHAN_GRACE_SECONDS
        while os.waitpid(child, os.WNOHANG)[0] != child:
            if time.monotonic() >= deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.02)
        # only now are processes that it had detached children of this one
        _kill_all(group=child)


@contextlib.contextmanager
def _woken_by_children() -> Iterator[int]:
    """A descriptor that becomes readable when a child ends."""
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


def _kill_all(*, group: int) -> None:
    """Until nobody is left: who is killed leaves its own children to this process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_SECONDS  # one may hang in the kernel
    while (pids := children()) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)
