"""Starts a process for each job of a sweep.

`GpuQueue` calls `start_job` in the sweep's process. The job's process is a fork, because the task
function may live in a script that cannot be imported. The sweep's process has not imported torch.
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


def start_job(
    work: Callable[[], int], log_path: Path, drop_handlers: Callable[[], None]
) -> ForkProcess:
    """Start a process that runs a job.

    Args:
        work: runs the job and returns the exit code of the process.
        log_path: the file that the process prints to.
        drop_handlers: removes the signal handlers that the process inherits from its parent.
    """
    with contextlib.suppress(ValueError):  # Only the main thread may set handlers.
        # Whoever started the sweep may ignore SIGCHLD, and then exit codes would be lost.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Block signals until the child has set its own handlers.
    signals = (*FORWARDED, *FORWARDED.values())
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def run_job(parent: int) -> None:
        # A terminal's Ctrl-C must only reach the sweep's process, which passes it on.
        os.setsid()
        signal_at_parents_death(signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.devnull, "rb") as nothing, log_path.open("ab") as log_file:
            os.dup2(nothing.fileno(), 0)
            os.dup2(log_file.fileno(), 1)
            os.dup2(log_file.fileno(), 2)
        signal.set_wakeup_fd(-1)
        drop_handlers()
        for signum in FORWARDED:
            signal.signal(signum, _raise_original)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        try:
            code = work()
        except KeyboardInterrupt as error:  # JobInterrupted derives from it, and has an exit code.
            code = getattr(error, "exit_code", 130)
        raise SystemExit(code)

    process = multiprocessing.get_context("fork").Process(target=run_job, args=(os.getpid(),))
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return process


def _raise_original(signum: int, frame: FrameType | None) -> None:
    """Send this process the signal that ``signum`` stands for, if no `SignalWatch` is active."""
    os.kill(os.getpid(), FORWARDED[signum])
