"""A sweep's jobs as rows, read from their run folders whichever launcher ran them, and their table:
columns on the screen, ``sweep.csv``, ``sweep.json``."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from robust_train.events import MalformedEvent, from_json
from robust_train.files import read_object, write_json
from robust_train.readable import signal_name
from robust_train.runfolder.summary import SavedSummary, aligned, read_summary
from robust_train.sweep import job_record

FILE = "sweep.json"
RUNNING, ENDED = "running", "ended"
COLUMNS = ("job", "overrides", "status", "attempts", "devices", "batch", "result", "wall")
_LONGEST_RESULT = 40
_EXIT_CODES = {job_record.COMPLETED: 0, "no_device": 75, job_record.INTERRUPTED: 143}
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class SweepRow:
    """One job of a sweep, as ``sweep.json`` has it."""

    job: int | None  # its number, None where it is not known
    overrides: tuple[str, ...]
    # `completed`, `failed`, `no_device`, `interrupted`, `refused`, `died` (without a summary) or
    # `not_started`
    status: str
    exit_code: int | None  # that of the job if it had run alone; None if it was not started
    attempts: int
    devices: tuple[str, ...]  # those of the attempts, in order, each once
    batch_size: int | None  # micro-batch of the last attempt
    result: Any  # the objective
    wall_seconds: float | None
    wait_seconds: float | None  # those of `wall_seconds` that it waited for a GPU
    reused: bool  # completed in an earlier launch of the sweep, not run again
    reason: str | None  # one sentence for any status but `completed`
    folder: str | None  # its run folder, None for a job that was not started

    @property
    def sort_key(self) -> tuple[bool, int]:
        """By number; those without one last."""
        return self.job is None, self.job or 0


def row_of(
    folder: Path | None,
    record: job_record.JobRecord | None,
    summary: SavedSummary | None,
    overrides: Sequence[str] = (),
) -> SweepRow:
    """Return the row of one job from its record and its ``summary.json``, where there are any.
    ``overrides`` count where there is no record."""
    ended = None if record is None or record.status == job_record.STARTED else record
    source = ended or summary
    status = job_record.DIED if source is None else source.status
    reason = None if source is None else source.reason
    if status == job_record.DIED and reason is None:
        reason = "its process ended without a summary"
    exit_code = ended.exit_code if ended is not None else _EXIT_CODES.get(status, 1)
    objective = summary.objective if summary is not None else record and record.objective
    attempts = () if summary is None else summary.attempts
    return SweepRow(
        job=None if record is None else record.number,
        overrides=tuple(overrides) if record is None else record.overrides,
        status=status,
        exit_code=None if status == job_record.NOT_STARTED else exit_code,
        attempts=len(attempts),
        devices=tuple(dict.fromkeys(attempt.device for attempt in attempts)),
        batch_size=attempts[-1].batch_size if attempts else None,
        result=objective if status == job_record.COMPLETED else None,
        wall_seconds=None if summary is None else summary.wall_seconds,
        wait_seconds=None if summary is None else summary.wait_seconds,
        reason=None if status == job_record.COMPLETED else reason,
        reused=record is not None and record.reused,
        folder=None if folder is None else str(folder),
    )


def ending_of_process(record: job_record.JobRecord, returncode: int) -> job_record.JobRecord:
    """Return the record of a job of which only its process's end is known."""
    if returncode == 0:
        return replace(record, status=job_record.COMPLETED, exit_code=0)
    if returncode > 0:
        is_stop, exit_code = returncode - 128 in _STOPS, returncode
        stopped = "interrupted"
        died = f"its process ended with exit code {returncode} and without a summary"
    else:
        is_stop, name = -returncode in _STOPS, signal_name(-returncode)
        exit_code = 128 - returncode if is_stop else 1
        stopped = f"interrupted by {name} before it had begun"
        died = f"its process was killed by {name}"
    status, reason = (job_record.INTERRUPTED, stopped) if is_stop else (job_record.DIED, died)
    return replace(record, status=status, exit_code=exit_code, reason=reason)


def read_row(folder: Path) -> SweepRow:
    """Return the row of the job in ``folder``, as far as it can be read."""
    record = job_record.read_record(folder)
    overrides = () if record is not None else _hydra_overrides(folder)
    return row_of(folder, record, read_summary(folder), overrides)


def read_rows(sweep_folder: Path, sweep: str, since_ns: int) -> list[SweepRow]:
    """Return the rows of the jobs of this launch of a sweep; the folder may hold others. A job
    without a record belongs to it if Hydra wrote its folder later than ``since_ns``."""
    rows = []
    for folder in job_folders(sweep_folder):
        record = job_record.read_record(folder)
        if record.sweep == sweep if record is not None else _is_newer(folder, since_ns):
            rows.append(read_row(folder))
    return rows


def has_failed(sweep_folder: Path, sweep: str) -> bool:
    """Return whether a job of this launch has ended otherwise than completed."""
    records = (job_record.read_record(folder) for folder in job_folders(sweep_folder))
    return any(r is not None and r.sweep == sweep and r.exit_code for r in records)


def exit_code_of(rows: Sequence[SweepRow]) -> int:
    """Return the code of the first job that failed by itself, else of the first stopped one."""
    codes = [
        row.exit_code for row in rows if row.exit_code and row.status != job_record.INTERRUPTED
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


CSV_COLUMNS = tuple(item.name for item in fields(SweepRow))


@dataclass(frozen=True)
class SweepTable:
    """The content of ``sweep.json``; a sweep that runs has no rows yet."""

    sweep: str
    launcher: str
    status: str = RUNNING
    exit_code: int | None = None
    wall_seconds: float | None = None
    jobs: tuple[SweepRow, ...] = ()
    schema: int = 1

    def write(self, folder: Path) -> None:
        """Write ``sweep.json``; raise ``OSError`` if that is not possible."""
        write_json(folder / FILE, asdict(self), indent=2)


def read_table(folder: Path) -> SweepTable | None:
    """Return the table in a sweep folder; None where there is none that can be read."""
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
    if row.status == job_record.COMPLETED:
        seconds = "" if row.wall_seconds is None else f" in {row.wall_seconds:.1f} s"
        return f"job {row.job} completed{seconds}"
    if row.status == job_record.INTERRUPTED:
        return f"job {row.job} interrupted"
    reason = " ".join(str(row.reason).split())
    return f"job {row.job} {row.status}: {reason}; {log_path}"


def tally(rows: Sequence[SweepRow]) -> str:
    """Return one line: how many jobs ended how."""
    counts = Counter(row.status for row in rows)
    done = counts.pop(job_record.COMPLETED, 0)
    others = "".join(f", {n} {status.replace('_', ' ')}" for status, n in sorted(counts.items()))
    return f"{done} of {len(rows)} completed{others}"


def differing_overrides(overrides: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return each job's overrides without those that all have; a single job keeps its own."""
    if len(overrides) < 2:
        return [tuple(own) for own in overrides]
    common = set(overrides[0]).intersection(*overrides[1:])
    return [tuple(override for override in own if override not in common) for own in overrides]


def as_csv(rows: Sequence[SweepRow]) -> str:
    """Return the content of ``sweep.csv``: a line of names, then one line a job."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in rows:
        writer.writerow([_cell(getattr(row, name)) for name in CSV_COLUMNS])
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, (tuple, list)) and all(isinstance(item, str) for item in value):
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
