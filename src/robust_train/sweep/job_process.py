"""One job of a sweep in a process of its own: a fork of the sweep's process, without torch.

A fork, because the task function may live in a script that cannot be imported.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from robust_train.host.linux import signal_at_parents_death
from robust_train.host.screen import flush_output
from robust_train.host.signals import FORWARDED, forwarded
from robust_train.model.errors import JobInterrupted

Work = Callable[
    [], int
]  # Runs the job; returns the exit code. The result is in the job's record.


class JobProcess:
    """A job's process, which begins its work at once."""

    def __init__(self, work: Work, log_path: Path, detach: Callable[[], None]) -> None:
        self.returncode: int | None = None
        flush_output()
        with contextlib.suppress(ValueError):  # outside the main thread
            # ignored by whoever has started the sweep, it would cost the exit codes
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        parent = os.getpid()
        # no signal may come between the fork and the child's own handlers
        signals = (*FORWARDED, *FORWARDED.values())
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                self._be_the_job(work, log_path, detach, parent, blocked)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def signal(self, signum: int) -> None:
        """Send a signal, if the process has not ended; one that it has received counts once."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, forwarded(signum))

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal as in subprocess; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def _be_the_job(
        self,
        work: Work,
        log_path: Path,
        detach: Callable[[], None],
        parent: int,
        blocked: set[Any],
    ) -> None:
        """Run in the child; never returns."""
        code = 1
        try:
            os.setsid()  # a terminal's Ctrl-C is for the sweep, which passes it on
            signal_at_parents_death(signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)
            _redirect_output(log_path)
            detach()
            for forwarded in FORWARDED:
                signal.signal(forwarded, _receive)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            code = work()
        except JobInterrupted as error:
            code = error.exit_code
        except KeyboardInterrupt:
            code = 130
        except SystemExit as error:
            code = (
                error.code
                if isinstance(error.code, int)
                else int(error.code is not None)
            )
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                logging.shutdown()
                flush_output()
            os._exit(code)


def _receive(signum: int, frame: FrameType | None) -> None:
    """Act as the forwarded signal does, while no job watches them."""
    os.kill(os.getpid(), FORWARDED[signum])


def _redirect_output(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.devnull, "rb") as nothing, path.open("ab") as log_file:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log_file.fileno(), 1)
        os.dup2(log_file.fileno(), 2)
