"""One job of a sweep in a process of its own: a fork of the sweep's process, without torch.

A fork, because the task function may live in a script that cannot be imported.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType

from robust_train.host.linux import signal_at_parents_death
from robust_train.host.signals import FORWARDED
from robust_train.model.errors import JobInterrupted

Work = Callable[[], int]
"""Runs the job; returns the exit code. The result is in the job's record."""


def start_job(
    work: Work,
    log_path: Path,
    detach: Callable[[], None],
) -> ForkProcess:
    """Start a job's process; it prints to ``log_path``, and calls ``detach`` before its work."""
    with contextlib.suppress(ValueError):  # outside the main thread
        # ignored by whoever has started the sweep, it would cost the exit codes
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # no signal may come between the fork and the child's own handlers
    signals = (*FORWARDED, *FORWARDED.values())
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def be_the_job(parent: int) -> None:
        os.setsid()  # a terminal's Ctrl-C is for the sweep, which passes it on
        signal_at_parents_death(signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.devnull, "rb") as nothing, log_path.open("ab") as log_file:
            os.dup2(nothing.fileno(), 0)
            os.dup2(log_file.fileno(), 1)
            os.dup2(log_file.fileno(), 2)
        detach()
        for signum in FORWARDED:
            signal.signal(signum, _receive)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        try:
            code = work()
        except JobInterrupted as error:
            code = error.exit_code
        except KeyboardInterrupt:
            code = 130
        raise SystemExit(code)

    process = multiprocessing.get_context("fork").Process(
        target=be_the_job,
        args=(os.getpid(),),
    )
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return process


def _receive(signum: int, frame: FrameType | None) -> None:
    """Act as the forwarded signal does, while no job watches them."""
    os.kill(os.getpid(), FORWARDED[signum])
