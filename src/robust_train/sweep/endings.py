"""How a job ended of which only its process's end is known, and what the screen says of it."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

from robust_train.sweep.record import COMPLETED, DIED, INTERRUPTED, JobRecord
from robust_train.sweep.rows import Row


def ending_of_process(record: JobRecord, returncode: int) -> JobRecord:
    """The record of a job of which only its process's end is known."""
    if returncode == 0:
        return replace(record, status=COMPLETED, exit_code=0)
    if returncode > 0:
        stopped = returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP)
        status, reason = (INTERRUPTED, "interrupted") if stopped else (DIED, None)
        reason = reason or f"its process ended with exit code {returncode} and without a summary"
        return replace(record, status=status, exit_code=returncode, reason=reason)
    name = signal.Signals(-returncode).name
    if -returncode in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        reason = f"interrupted by {name} before it had begun"
        return replace(record, status=INTERRUPTED, exit_code=128 - returncode, reason=reason)
    return replace(record, status=DIED, exit_code=1, reason=f"its process was killed by {name}")


def ending_line(row: Row, log_path: Path | None) -> str:
    """What the screen says when a job has ended."""
    if row.status == COMPLETED:
        seconds = "" if row.wall_seconds is None else f" in {row.wall_seconds:.1f} s"
        return f"job {row.job} completed{seconds}"
    reason = " ".join(str(row.reason).split())
    return f"job {row.job} {row.status}: {reason}; {log_path}"
