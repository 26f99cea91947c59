"""A sweep's jobs as rows, read from their run folders whichever launcher ran them, and their table.

The table is columns on the screen, ``sweep.csv`` and ``sweep.json``.
"""

from __future__ import annotations

import csv
import io
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from robust_train.files import read_object, write_json
from robust_train.folder.state import Summary, read_summary
from robust_train.model.events import SCHEMA, Json, MalformedEvent, from_json
from robust_train.readable import aligned, signal_name
from robust_train.sweep.job_record import (
    COMPLETED,
    DIED,
    INTERRUPTED,
    NOT_STARTED,
    STARTED,
    SweepJob,
    read_record,
)

FILE = "sweep.json"
RUNNING, ENDED = "running", "ended"
COLUMNS = (
    "job",
    "overrides",
    "status",
    "attempts",
    "devices",
    "batch",
    "result",
    "wall",
)
_LONGEST_RESULT = 40
_EXIT_CODES = {COMPLETED: 0, "no_device": 75, INTERRUPTED: 143}
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class SweepRow(SweepJob):
    """One job of a sweep, as ``sweep.json`` has it: its record, and figures of its summary.

    Attributes:
        attempts: their number.
        devices: those of the attempts, in order, each once.
        batch_size: micro-batch size of the last attempt.
        wall_seconds: how long the job took.
        wait_seconds: the part of ``wall_seconds`` that it waited for a GPU.
        folder: its run folder; None if the job was not started.
    """

    attempts: int = 0
    devices: tuple[str, ...] = ()
    batch_size: int | None = None
    wall_seconds: float | None = None
    wait_seconds: float | None = None
    folder: str | None = None

    @property
    def sort_key(self) -> tuple[bool, int]:
        """By number; those without one last."""
        return self.job is None, self.job or 0

    def as_json(self) -> dict[str, Json]:
        """Return the row without the sweep's id, which the table has."""
        return {name: getattr(self, name) for name in CSV_COLUMNS}


CSV_COLUMNS = (
    "job",
    "overrides",
    "status",
    "exit_code",
    "attempts",
    "devices",
    "batch_size",
    "result",
    "wall_seconds",
    "wait_seconds",
    "reused",
    "reason",
    "folder",
)


def row_of(folder: Path | None, record: SweepJob, summary: Summary | None) -> SweepRow:
    """Return the row of one job from its record and its ``summary.json``."""
    ended = _ended(record, summary) if record.status == STARTED else record
    if ended.status == COMPLETED:
        result = ended.result if summary is None else summary.objective
        ended = replace(ended, result=result, reason=None)
    else:
        exit_code = None if ended.status == NOT_STARTED else ended.exit_code
        ended = replace(ended, result=None, exit_code=exit_code)
    attempts = () if summary is None else summary.attempts
    has_batch = bool(attempts) and attempts[-1].spec.has_batch
    return SweepRow(
        **vars(ended),
        attempts=len(attempts),
        devices=tuple(dict.fromkeys(attempt.spec.device for attempt in attempts)),
        batch_size=attempts[-1].spec.batch_size if has_batch else None,
        wall_seconds=None if summary is None else summary.wall_seconds,
        wait_seconds=None if summary is None else summary.wait_seconds,
        folder=None if folder is None else str(folder),
    )


def _ended(record: SweepJob, summary: Summary | None) -> SweepJob:
    """Return the record of a job whose process did not record its end."""
    if summary is None:
        reason = "its process ended without a summary"
        return replace(record, status=DIED, exit_code=1, reason=reason)
    exit_code = _EXIT_CODES.get(summary.status, 1)
    return replace(
        record, status=summary.status, exit_code=exit_code, reason=summary.reason
    )


def ending_of_process(record: SweepJob, returncode: int) -> SweepJob:
    """Return the record of a job that left nothing but its process's end."""
    if returncode == 0:
        return replace(record, status=COMPLETED, exit_code=0)
    if returncode > 0:
        is_stop, exit_code = returncode - 128 in _STOPS, returncode
        stopped = "interrupted"
        died = f"its process ended with exit code {returncode} and without a summary"
    else:
        is_stop, name = -returncode in _STOPS, signal_name(-returncode)
        exit_code = 128 - returncode if is_stop else 1
        stopped = f"interrupted by {name} before it had begun"
        died = f"its process was killed by {name}"
    status, reason = (INTERRUPTED, stopped) if is_stop else (DIED, died)
    return replace(record, status=status, exit_code=exit_code, reason=reason)


def read_row(folder: Path) -> SweepRow:
    """Return the row of the job in ``folder``, as far as it can be read."""
    record = read_record(folder) or SweepJob(None, _hydra_overrides(folder))
    return row_of(folder, record, read_summary(folder))


def read_rows(sweep_folder: Path, sweep: str, since_ns: int) -> list[SweepRow]:
    """Return the rows of the jobs of this launch of a sweep; the folder may hold others. A job
    without a record belongs to it if Hydra wrote its folder later than ``since_ns``."""
    rows = []
    for folder in job_folders(sweep_folder):
        record = read_record(folder)
        if record.sweep == sweep if record is not None else _is_newer(folder, since_ns):
            rows.append(read_row(folder))
    return rows


def has_failed(sweep_folder: Path, sweep: str) -> bool:
    """Return whether a job of this launch has ended otherwise than completed."""
    records = (read_record(folder) for folder in job_folders(sweep_folder))
    return any(r is not None and r.sweep == sweep and r.exit_code for r in records)


def exit_code_of(rows: Sequence[SweepRow]) -> int:
    """Return the code of the first job that failed by itself, else of the first stopped one."""
    codes = [
        row.exit_code for row in rows if row.exit_code and row.status != INTERRUPTED
    ]
    stopped = [row.exit_code for row in rows if row.exit_code]
    return next(iter(codes + stopped), 0)


def job_folders(sweep_folder: Path) -> Iterator[Path]:
    """Yield every run folder of a sweep; ``hydra.sweep.subdir`` may have several levels."""
    for folder, names, files in os.walk(sweep_folder):
        if ".hydra" in names or "sweep_job.json" in files:
            names.clear()  # no job lies inside another
            yield Path(folder)
        else:
            names[:] = sorted(name for name in names if not name.startswith("."))


def _hydra_overrides(folder: Path) -> tuple[str, ...]:
    try:
        content = OmegaConf.load(folder / ".hydra" / "overrides.yaml")
    except (OSError, ValueError, OmegaConfBaseException):
        return ()
    return tuple(map(str, content)) if isinstance(content, ListConfig) else ()


def _is_newer(folder: Path, since_ns: int) -> bool:
    try:
        return (folder / ".hydra" / "overrides.yaml").stat().st_mtime_ns >= since_ns
    except OSError:
        return False


@dataclass(frozen=True)
class SweepTable:
    """The content of ``sweep.json``; a sweep that runs has no rows yet."""

    sweep: str
    launcher: str
    status: str = RUNNING
    exit_code: int | None = None
    wall_seconds: float | None = None
    jobs: tuple[SweepRow, ...] = ()
    schema: int = SCHEMA

    def write(self, folder: Path) -> None:
        """Write ``sweep.json``; raise ``OSError`` if that is not possible."""
        content = {**vars(self), "jobs": [row.as_json() for row in self.jobs]}
        write_json(folder / FILE, content, indent=2)


def read_table(folder: Path) -> SweepTable | None:
    """Return the table in a sweep folder; None if there is none that can be read."""
    try:
        return from_json(SweepTable, read_object(folder / FILE))
    except MalformedEvent:
        return None


def screen_table(rows: Sequence[SweepRow]) -> str:
    """Return plain columns; of the overrides only those in which the jobs differ."""
    differing = differing_overrides([row.overrides for row in rows])
    lines = [COLUMNS]
    for row, overrides in zip(rows, differing, strict=True):
        lines.append(
            (
                "?" if row.job is None else str(row.job),
                " ".join(overrides),
                f"{row.status} earlier" if row.reused else row.status,
                str(row.attempts),
                ",".join(row.devices) or "-",
                "-" if row.batch_size is None else str(row.batch_size),
                short_result(row.result),
                "-" if row.wall_seconds is None else f"{row.wall_seconds:.1f} s",
            )
        )
    return "\n".join(aligned(lines))


def ending_line(row: SweepRow, log_path: Path) -> str:
    """Return the line for the screen when a job has ended."""
    if row.status == COMPLETED:
        seconds = "" if row.wall_seconds is None else f" in {row.wall_seconds:.1f} s"
        return f"job {row.job} completed{seconds}"
    if row.status == INTERRUPTED:
        return f"job {row.job} interrupted"
    reason = " ".join(str(row.reason).split())
    return f"job {row.job} {row.status}: {reason}; {log_path}"


def tally(rows: Sequence[SweepRow]) -> str:
    """Return one line: how many jobs ended how."""
    counts = Counter(row.status for row in rows)
    done = counts.pop(COMPLETED, 0)
    others = "".join(
        f", {n} {status.replace('_', ' ')}" for status, n in sorted(counts.items())
    )
    return f"{done} of {len(rows)} completed{others}"


def differing_overrides(overrides: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return each job's overrides without those that all have; a single job keeps its own."""
    if len(overrides) < 2:
        return [tuple(own) for own in overrides]
    common = set(overrides[0]).intersection(*overrides[1:])
    return [
        tuple(override for override in own if override not in common)
        for own in overrides
    ]


def as_csv(rows: Sequence[SweepRow]) -> str:
    """Return the content of ``sweep.csv``: a line of names, then one line a job."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in rows:
        writer.writerow([_cell(getattr(row, name)) for name in CSV_COLUMNS])
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, (tuple, list)) and all(
        isinstance(item, str) for item in value
    ):
        return " ".join(value)
    if isinstance(value, (dict, list, tuple, bool)):
        return json.dumps(value, ensure_ascii=False)
    return value


def short_result(result: Any) -> str:
    """Return a result for one cell of a table."""
    if result is None:
        return "-"
    if isinstance(result, float):
        return f"{result:.6g}"
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_RESULT else text[: _LONGEST_RESULT - 1] + "…"
