"""Probe runs, which the command ``need`` starts to measure a program's memory.

A probe runs the program as a job of its own. The job's launcher stops it once its memory is
measured.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from robust_train.files import write_json
from robust_train.folder.requests import LAUNCHERS_VERB, new_request

_VARIABLE = "ROBUST_TRAIN_PROBE"
"""Set for the launcher of a probe run. Its attempts inherit the variable but do not read it."""


def run_probe(argv: Sequence[str], batch_size: str | None) -> int:
    """Run a program until its memory is measured, and return the exit code of its job.

    The job prints to standard error, because standard output is for the command's answer. The run
    folder is removed afterwards, and the measurement stays in the store.
    """
    with tempfile.TemporaryDirectory(
        prefix="robust-train-probe-", ignore_cleanup_errors=True
    ) as folder:
        command = [sys.executable, "-m", "robust_train.cli.main", "run"]
        options = ["--min-gpu-memory-mb", "auto", "--no-cpu", "--name", "probe"]
        if batch_size is not None:
            options += ["--batch-size", batch_size]
        # The run folder is removed, so a later launch cannot resume the job.
        command += [*options, "resume=false", "--run-dir", folder, "--", *argv]
        return _ended_job(command)


def _ended_job(command: Sequence[str]) -> int:
    """Run a job to its end, and return its exit code. Signals to this command end the job.

    Raises:
        KeyboardInterrupt: this command received a signal, and the job has ended.
    """
    job: subprocess.Popen[bytes] | None = None
    received: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        # A terminal sends Ctrl-C to both processes.
        if job is not None and signum != signal.SIGINT:
            job.send_signal(signum)

    signums = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {
        signum: signal.signal(signum, forward)
        for signum in signums
        # An ignored signal stays ignored in the job, for example SIGHUP under nohup.
        if signal.getsignal(signum) != signal.SIG_IGN
    }
    try:
        job = subprocess.Popen(
            command, env={**os.environ, _VARIABLE: "1"}, stdin=subprocess.DEVNULL, stdout=sys.stderr
        )
        code = job.wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if received:
        raise KeyboardInterrupt
    return code


def is_probe() -> bool:
    """Return whether this launcher runs a probe."""
    return os.environ.get(_VARIABLE) == "1"


def stop_probe(run_dir: Path) -> None:
    """Ask the job in a run folder to stop, as ``robust-train stop`` does."""
    write_json(new_request(run_dir), {"verb": LAUNCHERS_VERB})
