"""A sweep on disk: ``sweep_job.json`` in each job's run folder, and ``sweep.json`` of all jobs.

Jobs are read from their run folders, whichever launcher ran them. A later launch of the same sweep
reads there which overrides a folder was used with.
"""

from __future__ import annotations

import contextlib
import csv
import enum
import io
import json
import math
import os
import re
import signal
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from robust_train.files import read_object, write_json
from robust_train.folder.provenance import public_command
from robust_train.folder.state import EXIT_CODES, Summary, read_summary
from robust_train.model.events import SCHEMA, Json, MalformedEvent, from_json
from robust_train.readable import aligned, shortened, signal_name

JOB_FILE, SWEEP_FILE = "sweep_job.json", "sweep.json"
_JOB_SCHEMA = 2

STARTED = "started"
COMPLETED = "completed"
FAILED = "failed"
REFUSED = "refused"
INTERRUPTED = "interrupted"
PRUNED = "pruned"
NOT_STARTED = "not_started"
DIED = "died"
RUNNING, ENDED = "running", "ended"

COLUMNS = (
    "job",
    "overrides",
    "status",
    "attempts",
    "devices",
    "micro-batch",
    "result",
    "wall",
)
_LONGEST_RESULT = 40
OF_THE_SWEEP = re.compile(r"\+{0,2}(sweep_resume|sweep_fail_fast|resume)=")
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep, as ``sweep.json`` has it; a run folder has what its summary lacks.

    Attributes:
        job: its number; None if unknown.
        overrides: its own overrides.
        sweep: the launch of the sweep that wrote this; empty if unknown.
        status: ``started`` until its end is known, then ``completed``, ``failed``, ``pruned``,
            ``no_device``, ``interrupted``, ``refused``, ``not_started``, or ``died`` without a
            summary.
        exit_code: that of the job if it had run alone; None before its end.
        attempts: their number.
        devices: those of the attempts, in order, each once.
        batch_size: micro-batch size of the last attempt.
        result: the objective.
        wall_seconds: how long the job took.
        wait_seconds: the part of ``wall_seconds`` that it waited for a GPU.
        reused: it completed in an earlier launch of the sweep, and was not run again.
        reason: one sentence for any end but ``completed``.
        folder: its run folder; None if the job was not started.
        trial: the number of what was tried, which ``repeat`` jobs share.
    """

    job: int | None
    overrides: tuple[str, ...]
    sweep: str = ""
    status: str = STARTED
    exit_code: int | None = None
    attempts: int = 0
    devices: tuple[str, ...] = ()
    batch_size: int | None = None
    result: Any = None
    wall_seconds: float | None = None
    wait_seconds: float | None = None
    reused: bool = False
    reason: str | None = None
    folder: str | None = None
    trial: int | None = None

    @property
    def gpus(self) -> int:
        """How many it had last, 1 for the CPU."""
        return self.devices[-1].count(",") + 1 if self.devices else 1

    @property
    def sort_key(self) -> tuple[bool, int]:
        """By number; those without one last."""
        return self.job is None, self.job or 0

    def write(self, folder: Path) -> None:
        """Write what its summary lacks to the job's run folder, whole or not at all."""
        content = {name: getattr(self, name) for name in _OF_THE_FOLDER}
        write_json(
            folder / JOB_FILE,
            {"schema": _JOB_SCHEMA, **content},
            indent=2,
        )

    def as_json(self) -> dict[str, Json]:
        """Return the row without the sweep's id, which the table has."""
        return {name: value for name, value in vars(self).items() if name != "sweep"}


_OF_THE_FOLDER = (
    "job",
    "overrides",
    "sweep",
    "status",
    "exit_code",
    "result",
    "reason",
    "reused",
    "trial",
)


class JobStart(enum.Enum):
    """What to do with a job that is about to start."""

    RUN = "run"  # from the checkpoint that the run folder holds, if any
    AFRESH = "afresh"  # the run folder holds another job's files, or resume is off
    REUSE = "reuse"  # completed or pruned earlier


def decide(
    record: SweepJob | None,
    *,
    completed: bool,
    overrides: Sequence[str],
    sweep: str,
    resume: bool,
) -> JobStart:
    """Return what to do with a job with these ``overrides`` in this launch of the ``sweep``.
    ``record`` is that of an earlier job in the run folder; ``completed`` means that one."""
    afresh = JobStart.RUN if resume else JobStart.AFRESH
    if record is None:
        return afresh
    # whatever the order, and how they are resumed
    before, now = (
        sorted(one for one in each if not OF_THE_SWEEP.match(one))
        for each in (record.overrides, overrides)
    )
    if before != now:
        return JobStart.AFRESH
    if record.sweep == sweep:  # put back into the queue, or left by another launcher
        return JobStart.REUSE if completed else JobStart.RUN
    return JobStart.REUSE if resume and completed else afresh


def read_record(folder: Path) -> SweepJob | None:
    """Return the record in a run folder; None if there is none that can be read."""
    try:
        return from_json(SweepJob, read_object(folder / JOB_FILE))
    except MalformedEvent:
        return None


def row_of(
    folder: Path | None,
    job: SweepJob,
    summary: Summary | None,
) -> SweepJob:
    """Return a job as it stands, from its record and its ``summary.json``."""
    if job.status == STARTED:  # its process did not record its end
        job = _ended(job, summary)
    if job.status == COMPLETED:
        result = job.result if summary is None else summary.objective
        job = replace(job, result=result, reason=None)
    else:
        exit_code = None if job.status == NOT_STARTED else job.exit_code
        job = replace(job, result=None, exit_code=exit_code)
    job = replace(job, folder=None if folder is None else str(folder))
    if summary is None:
        return job
    specs = [attempt.spec for attempt in summary.attempts]
    has_batch = bool(specs) and specs[-1].has_batch
    return replace(
        job,
        attempts=len(specs),
        devices=tuple(dict.fromkeys(spec.device for spec in specs)),
        batch_size=specs[-1].batch_size if has_batch else None,
        wall_seconds=summary.wall_seconds,
        wait_seconds=summary.wait_seconds,
    )


def _ended(record: SweepJob, summary: Summary | None) -> SweepJob:
    status, reason = DIED, "its process ended without a summary"
    if summary is not None:
        status, reason = summary.status, summary.reason or ""
    code = 143 if status == INTERRUPTED else EXIT_CODES.get(status, 1)
    return replace(
        record,
        status=status,
        exit_code=code,
        reason=reason or None,
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
    return replace(
        record,
        status=status,
        exit_code=exit_code,
        reason=reason,
    )


def read_row(folder: Path) -> SweepJob:
    """Return the row of the job in ``folder``, as far as it can be read."""
    record = read_record(folder) or SweepJob(None, _hydra_overrides(folder))
    return row_of(folder, record, read_summary(folder))


def read_rows(sweep_folder: Path, sweep: str) -> list[SweepJob]:
    """Return the rows of the jobs of this launch of a sweep; the folder may hold others."""
    rows = [read_row(folder) for folder in job_folders(sweep_folder)]
    return [row for row in rows if row.sweep == sweep]


def adopt(
    sweep_folder: Path,
    sweep: str,
    jobs: Container[int | None],
) -> None:
    """Make jobs that ended in an earlier launch a part of this one."""
    for folder in job_folders(sweep_folder):
        record = read_record(folder)
        if record is not None and record.sweep != sweep and record.job in jobs:
            with contextlib.suppress(OSError):
                replace(record, sweep=sweep, reused=True).write(folder)


def has_failed(sweep_folder: Path, sweep: str) -> bool:
    """Return whether a job of this launch has ended otherwise than completed."""
    records = filter(None, map(read_record, job_folders(sweep_folder)))
    return any(r.sweep == sweep and r.exit_code and not r.reused for r in records)


def exit_code_of(rows: Sequence[SweepJob]) -> int:
    """Return the code of the first job that failed by itself, else of the first stopped one."""
    failed = sorted(rows, key=lambda row: row.status == INTERRUPTED)
    return next((row.exit_code for row in failed if row.exit_code), 0)


def job_folders(sweep_folder: Path) -> Iterator[Path]:
    """Yield every run folder of a sweep; ``hydra.sweep.subdir`` may have several levels."""
    for folder, names, files in os.walk(sweep_folder):
        if ".hydra" in names or JOB_FILE in files:
            names.clear()  # no job lies inside another
            yield Path(folder)
        else:
            names[:] = sorted(name for name in names if not name.startswith("."))


def _hydra_overrides(folder: Path) -> tuple[str, ...]:
    try:
        content = OmegaConf.load(folder / ".hydra" / "overrides.yaml")
    except (OSError, ValueError, OmegaConfBaseException):
        return ()
    words = OmegaConf.to_container(content, resolve=False)
    return tuple(map(str, words)) if isinstance(words, list) else ()


@dataclass(frozen=True)
class SweepTable:
    """The content of ``sweep.json``; a sweep that runs has no rows yet."""

    sweep: str
    launcher: str
    status: str = RUNNING
    exit_code: int | None = None
    wall_seconds: float | None = None
    jobs: tuple[SweepJob, ...] = ()
    schema: int = SCHEMA
    resume_command: str | None = None  # a shell command, for any working directory
    # of the command: a launcher with the same may join in
    overrides: tuple[str, ...] = ()
    direction: str = "maximize"  # or `minimize`: what of the results is best
    repeat: int = 1  # jobs of each point, which differ in their seeds

    @property
    def sign(self) -> int:
        """1 if the largest result is the best, -1 if the smallest is."""
        return -1 if self.direction == "minimize" else 1

    def write(self, folder: Path) -> None:
        """Write ``sweep.json``; raise ``OSError`` if that is not possible."""
        content = {**vars(self), "jobs": [row.as_json() for row in self.jobs]}
        write_json(
            folder / SWEEP_FILE,
            content,
            indent=2,
        )


def read_table(folder: Path) -> SweepTable | None:
    """Return the table in a sweep folder; None if there is none that can be read."""
    try:
        return from_json(SweepTable, read_object(folder / SWEEP_FILE))
    except MalformedEvent:
        return None


@dataclass(frozen=True)
class Point:
    """What a sweep has tried: one job, or with ``repeat`` several that differ in their seeds."""

    number: int
    rows: tuple[SweepJob, ...]

    @property
    def values(self) -> list[float]:
        """The results of its jobs that completed, if they are numbers."""
        results = [row.result for row in self.rows if row.status == COMPLETED]
        return [one for one in map(as_number, results) if one is not None]

    @property
    def shared(self) -> list[str]:
        """The overrides that all its jobs have."""
        first, *others = self.rows
        return [
            override
            for override in first.overrides
            if all(override in other.overrides for other in others)
        ]

    def best(self, sign: int) -> SweepJob:
        """Return the best of its jobs, one of which has a value."""

        def rank(row: SweepJob) -> float:
            value = as_number(row.result) if row.status == COMPLETED else None
            return -math.inf if value is None else sign * value

        return max(self.rows, key=rank)


def best_first(table: SweepTable) -> list[Point]:
    """Return what a sweep has tried, the best first, what has no value last."""
    points: dict[int, list[SweepJob]] = {}
    for row in table.jobs:
        if row.job is not None:
            points.setdefault(row.job // table.repeat, []).append(row)

    def rank(point: Point) -> tuple[bool, float]:
        values = point.values
        return not values, -table.sign * fmean(values) if values else 0.0

    return sorted((Point(n, tuple(rows)) for n, rows in points.items()), key=rank)


def as_number(result: Any) -> float | None:
    """Return a result as the number that a search takes it for; None if it is none."""
    try:
        value = float(result)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(value) else value


def point_table(points: Sequence[Point]) -> str:
    """Return what each point has reached over its seeds; failed ones are named."""
    columns: tuple[object, ...] = ("trial", "mean ± std", "seeds", "overrides", "")
    lines = [columns]
    common = set.intersection(*(set(point.shared) for point in points))
    if len(points) == 1:
        common.clear()
    for point in points:
        values = point.values
        spread = f" ± {stdev(values):.3g}" if len(values) > 1 else ""
        failed = [
            " ".join(o for o in row.overrides if o not in point.shared)
            for row in point.rows
            if row.status not in (COMPLETED, PRUNED)
        ]
        lines.append(
            (
                point.number,
                f"{fmean(values):.6g}{spread}" if values else "-",
                f"{len(values)} of {len(point.rows)}",
                " ".join(public_command([o for o in point.shared if o not in common])),
                f"without {', '.join(failed)}" if failed else "",
            )
        )
    return "\n".join(aligned(lines))


def screen_table(rows: Sequence[SweepJob]) -> str:
    """Return plain columns; of the overrides only those in which the jobs differ."""
    lines: list[tuple[object, ...]] = [COLUMNS]
    for row, overrides in zip(rows, differing_overrides(rows), strict=True):
        wall = row.wall_seconds
        lines.append(
            (
                "?" if row.job is None else row.job,
                overrides,
                f"{row.status} earlier" if row.reused else row.status,
                row.attempts,
                ",".join(row.devices),
                row.batch_size,
                short_result(row.result),
                None if wall is None else f"{wall:.1f} s",
            )
        )
    return "\n".join(aligned(lines))


def ending_line(row: SweepJob, log_path: Path) -> str:
    """Return the line for the screen when a job has ended."""
    if row.status == COMPLETED:
        seconds = "" if row.wall_seconds is None else f" in {row.wall_seconds:.1f} s"
        return f"job {row.job} completed{seconds}"
    if row.status == INTERRUPTED:
        return f"job {row.job} interrupted"
    if row.status == PRUNED:
        return f"job {row.job} pruned: {row.reason}"
    reason = " ".join(str(row.reason).split())
    return f"job {row.job} {row.status}: {reason}; {log_path}"


def tally(rows: Sequence[SweepJob]) -> str:
    """Return one line: how many jobs ended how."""
    counts = Counter(row.status.replace("_", " ") for row in rows)
    done = counts.pop(COMPLETED, 0)
    others = "".join(f", {n} {status}" for status, n in sorted(counts.items()))
    return f"{done} of {len(rows)} completed{others}"


def differing_overrides(jobs: Sequence[SweepJob]) -> list[str]:
    """Return each job's overrides without those that all have; a single job keeps its own."""
    common: set[str] = set()
    if len(jobs) > 1:
        common = set(jobs[0].overrides).intersection(*(job.overrides for job in jobs))
    own = ([o for o in job.overrides if o not in common] for job in jobs)
    return [" ".join(public_command(overrides)) for overrides in own]


def as_csv(rows: Sequence[SweepJob]) -> str:
    """Return the content of ``sweep.csv``: a line of names, then one line a job."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = (field.name for field in fields(SweepJob))
    writer.writerow(name for name in names if name != "sweep")
    for row in rows:
        writer.writerow(map(_cell, row.as_json().values()))
    return text.getvalue()


def _cell(value: Any) -> Any:
    is_list = isinstance(value, (tuple, list))
    if is_list and all(isinstance(item, str) for item in value):
        return " ".join(value)
    if is_list or isinstance(value, (dict, bool)):
        return json.dumps(value, ensure_ascii=False)
    return value


def short_result(result: Any) -> str:
    """Return a result for one cell of a table."""
    if result is None:
        return "-"
    if isinstance(result, float):
        return f"{result:.6g}"
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    return shortened(text, _LONGEST_RESULT)
