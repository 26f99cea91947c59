"""A probe run: a program runs as a job until its memory is measured, then it is stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

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
        job = subprocess.run(
            [*command, *options, "--run-dir", folder, "--", *argv],
            env={**os.environ, _VARIABLE: "1"},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            check=False,
        )
    return job.returncode


def is_probe() -> bool:
    """Return whether this launcher runs a probe."""
    return os.environ.get(_VARIABLE) == "1"


def stop_probe(run_dir: Path) -> None:
    """Request the end of the job in a run folder, as ``robust-train stop`` does."""
    write_json(new_request(run_dir), {"verb": LAUNCHERS_VERB})
