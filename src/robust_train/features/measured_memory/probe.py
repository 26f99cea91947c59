"""A probe run: a program runs as a job until its memory is measured, then it is stopped."""

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
"""Set for the launcher of a probe run. Its attempts inherit it, and do not use it."""


def run_probe(argv: Sequence[str], batch_size: str | None) -> int:
    """Run a program until it is measured, and return the exit code of its job.

    It prints to standard error, because the answer of the command is on standard output.
    The run folder is removed, and the result stays in the store.
    """
    with tempfile.TemporaryDirectory(
        prefix="robust-train-probe-", ignore_cleanup_errors=True
    ) as folder:
        command = [sys.executable, "-m", "robust_train.cli.main", "run"]
        options = ["--min-gpu-memory-mb", "auto", "--no-cpu", "--name", "probe"]
        if batch_size is not None:
            options += ["--batch-size", batch_size]
        # Its run folder is removed, so nothing can resume it.
        command += [*options, "resume=false", "--run-dir", folder, "--", *argv]
        return _ended_job(command)


def _ended_job(command: Sequence[str]) -> int:
    """Run a job to its end, and return its exit code. Its signals end it, as if it ran alone.

    Raises:
        KeyboardInterrupt: this command received a signal, and the job has ended.
    """
    job: subprocess.Popen[bytes] | None = None
    received: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        # A terminal sends Ctrl-C to both.
        if job is not None and signum != signal.SIGINT:
            job.send_signal(signum)

    signums = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {
        signum: signal.signal(signum, forward)
        for signum in signums
        # The job inherits that a signal is ignored, as nohup does with SIGHUP.
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
    """Request the end of the job in a run folder, as ``robust-train stop`` does."""
    write_json(new_request(run_dir), {"verb": LAUNCHERS_VERB})
