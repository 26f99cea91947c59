"""One job of a sweep in a process of its own: a fork of the launcher, which has no torch in it.

A fork, because the task function may live in a script that cannot be imported, and because Hydra
is loaded already: the job starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from robust_train.errors import JobInterrupted
from robust_train.execution import at_hand
from robust_train.execution.linux import signal_at_parents_death
from robust_train.execution.output import flush_output

_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,
)

Work = Callable[[], tuple[Any, int]]
"""Runs the job; what the launcher shall get, and the exit code."""


class JobProcess:
    """A job's process. It is forked at once and begins its work when told to.

    Args:
        work: what to do; it runs in the process.
        log_path: where everything goes that the process prints.
        warm: the job will want a fork server: begin to import torch while waiting to be told.
        detach: undoes in the process what the launcher had set up for itself.
    """

    def __init__(
        self, work: Work, log_path: Path, *, warm: bool, detach: Callable[[], None]
    ) -> None:
        self._go_read, self._go_write = os.pipe()
        # in memory: the result may be larger than a pipe holds, and nobody reads until the end
        self._result_fd = os.memfd_create("job-result")
        self._descriptors = [self._go_write, self._result_fd]
        self.returncode: int | None = None
        self.is_working = False
        flush_output()
        parent = os.getpid()
        # no signal may come between the fork and the child's own handlers
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            gc.freeze()  # pages that nobody touches stay shared
            self.pid = os.fork()
            if self.pid == 0:
                self._be_the_job(work, log_path, warm, detach, parent, blocked)
        finally:
            gc.unfreeze()
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(self._go_read)

    def go(self) -> None:
        """Begin the work."""
        self.is_working = True
        with contextlib.suppress(OSError):
            os.write(self._go_write, b"g")

    def signal(self, signum: int) -> None:
        """Send a signal, if the process has not ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def discard(self) -> None:
        """End a process that has not begun its work."""
        self.signal(signal.SIGKILL)
        if self.returncode is None:
            os.waitpid(self.pid, 0)
        self.close()

    def poll(self) -> int | None:
        """The exit code, negative for a signal as subprocess has it; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def result(self) -> Any:
        """What the work returned; None where it did not come to that."""
        with os.fdopen(os.dup(self._result_fd), "rb") as file:
            file.seek(0)
            try:
                return pickle.load(file)
            except Exception:  # nothing there, torn, or of a class that cannot be rebuilt
                return None

    def close(self) -> None:
        """Release what belongs to an ended process; in a sibling, what it inherited of this one."""
        while self._descriptors:
            with contextlib.suppress(OSError):
                os.close(self._descriptors.pop())

    def _be_the_job(
        self,
        work: Work,
        log_path: Path,
        warm: bool,
        detach: Callable[[], None],
        parent: int,
        blocked: set[Any],
    ) -> None:
        """Runs in the child and never returns."""
        code = 1
        try:
            os.setsid()  # a terminal's Ctrl-C is for the launcher, which passes it on
            _end_with_parent(parent)
            os.close(self._go_write)
            _print_to(log_path)
            detach()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            if warm:
                at_hand.warm_up(("torch",))
            else:
                at_hand.discard()
            if os.read(self._go_read, 1):
                result, code = work()
                self._send(result)
        except JobInterrupted as error:
            code = error.exit_code
        except KeyboardInterrupt:
            code = 130
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                at_hand.discard()
                logging.shutdown()
                flush_output()
            os._exit(code)

    def _send(self, result: Any) -> None:
        try:
            data = pickle.dumps(result)
        except Exception as error:
            print(f"the job's result cannot be passed on: {error}", file=sys.stderr)
            return
        with os.fdopen(self._result_fd, "wb") as file:
            file.write(data)


def _end_with_parent(parent: int) -> None:
    """Be told to stop, with a last checkpoint, when the launcher dies however it does."""
    signal_at_parents_death(signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def _print_to(path: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    path.parent.mkdir(parents=True, exist_ok=True)
    log_file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log_file, 1)
    os.dup2(log_file, 2)
    os.close(log_file)
