"""A sweep on disk: ``sweep_job.json`` in each job's run folder, and ``sweep.json`` of all jobs.

A job is one record, folded from its run folder, whichever launcher ran it: shown while it runs, at
the end and by commands, and what a later launch of the sweep reads.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from omegaconf import OmegaConf

from robust_train.files import read_object, write_json
from robust_train.folder.lock import is_held
from robust_train.folder.provenance import public_command
from robust_train.folder.state import EXIT_CODES, read_state, read_summary
from robust_train.model.attempt import Attempt
from robust_train.model.events import SCHEMA, Json, MalformedEvent, from_json
from robust_train.readable import aligned, shortened

JOB_FILE, SWEEP_FILE = "sweep_job.json", "sweep.json"
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
    "step",
    "result",
    "time",
)
_OTHER_LINES = 3  # the names of the columns, the tally and the line with the cursor
_LEAST_COLUMNS = 10  # of the overrides
_LONGEST_RESULT = 40
OF_THE_SWEEP = re.compile(r"\+{0,2}(sweep_resume|sweep_fail_fast|resume)=")


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep, as ``sweep.json`` has it; None if unknown or not yet."""

    job: int | None  # its number
    overrides: tuple[str, ...]
    sweep: str = ""  # the launch of the sweep that ran it, or reused it
    # `started` in its run folder until its end is known; of a job that runs the name of its state
    status: str = STARTED
    exit_code: int | None = None  # that of the job if it had run alone
    attempts: int = 0
    devices: tuple[str, ...] = ()  # of the attempts, in order, each once
    batch_size: int | None = None  # micro-batch size of the last attempt
    step: int | None = None  # the last one that it reported, of `total_steps`
    total_steps: int | None = None
    result: Any = None  # the objective
    wall_seconds: float | None = None
    wait_seconds: float | None = None  # of those, waiting for a GPU
    reused: bool = False  # completed in an earlier launch of the sweep
    reason: str | None = None  # one sentence for any end but `completed`
    folder: str | None = None  # None: not started
    trial: int | None = None  # the number of what was tried, which `repeat` jobs share

    @property
    def is_running(self) -> bool:
        """Whether it has begun and not ended."""
        return self.exit_code is None and self.status != NOT_STARTED

    @property
    def has_failed(self) -> bool:
        """Whether it has ended otherwise than completed or pruned."""
        return bool(self.exit_code)

    @property
    def value(self) -> float | None:
        """The result of a job that completed as a search takes it; None if it is no number."""
        with contextlib.suppress(TypeError, ValueError):
            value = float(self.result)
            if self.status == COMPLETED and not math.isnan(value):
                return value
        return None

    def write(self, folder: Path) -> None:
        """Write it into its run folder, whole or not at all. Raises OSError."""
        write_json(folder / JOB_FILE, {"schema": 2, **vars(self)}, indent=2)

    def as_json(self) -> dict[str, Json]:
        """Return the row without the sweep's id, which the table has."""
        return {name: value for name, value in vars(self).items() if name != "sweep"}


def decide(
    earlier: SweepJob | None,
    own: SweepJob,
    *,
    completed: bool,
    resume: bool,
) -> str:
    """Return what to do with a job that is about to start in a folder where an ``earlier`` one,
    which may have ``completed``, has left its record.

    ``run``: from the checkpoint that is there, if any; ``afresh``: what is there is another job's,
    or not to be resumed; ``reuse``: it completed.
    """
    if earlier is not None:
        # whatever the order, and how they are resumed
        before, now = (
            sorted(one for one in job.overrides if not OF_THE_SWEEP.match(one))
            for job in (earlier, own)
        )
        if before != now:
            return "afresh"
        # put back into the queue, or left by another launcher
        resume = resume or earlier.sweep == own.sweep
    if not resume:
        return "afresh"
    return "reuse" if completed else "run"


def read_record(folder: Path) -> SweepJob | None:
    """Return the record in a run folder; None if there is none that can be read."""
    with contextlib.suppress(MalformedEvent):
        return from_json(SweepJob, read_object(folder / JOB_FILE))
    return None


def read_row(folder: Path) -> SweepJob:
    """Return the job in ``folder`` as it stands, as far as it can be read."""
    job = read_record(folder) or SweepJob(None, _hydra_overrides(folder))
    job = replace(job, folder=str(folder))
    summary = read_summary(folder)
    attempts: tuple[Attempt, ...] = ()
    if summary is not None:
        attempts = summary.attempts
        job = replace(
            job,
            attempts=len(attempts),
            wall_seconds=summary.wall_seconds,
            wait_seconds=summary.wait_seconds,
        )
    if job.status != STARTED:
        pass
    elif summary is not None:  # its process did not record its end
        code = 143 if summary.status == INTERRUPTED else EXIT_CODES.get(summary.status)
        job = replace(
            job,
            status=summary.status,
            exit_code=1 if code is None else code,
            reason=summary.reason or None,
        )
    elif is_held(folder):
        state = read_state(folder)
        is_known = state is not None and not state.is_final
        job = replace(job, status=state.state if state and is_known else RUNNING)
        if state is not None and state.attempt is not None and is_known:
            attempts = (state.attempt,)
            job = replace(job, attempts=state.attempt.number)
    else:
        why = "its process ended without a summary"
        job = replace(job, status=DIED, exit_code=1, reason=why)
    if job.status != COMPLETED:
        job = replace(job, result=None)
    elif summary is not None:
        job = replace(job, result=summary.objective, reason=None)
    if not attempts:
        return job
    last = attempts[-1]
    return replace(
        job,
        devices=tuple(dict.fromkeys(one.spec.device for one in attempts)),
        batch_size=last.spec.batch_size if last.spec.has_batch else None,
        step=last.step,
        total_steps=last.total_steps,
    )


def read_rows(sweep_folder: Path, sweep: str) -> list[SweepJob]:
    """Return the rows of the jobs of this launch of a sweep; the folder may hold others."""
    rows = [read_row(folder) for folder in job_folders(sweep_folder)]
    return [row for row in rows if row.sweep == sweep]


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
    with contextlib.suppress(Exception):  # whatever is in that file
        content = OmegaConf.load(folder / ".hydra" / "overrides.yaml")
        return tuple(map(str, content))
    return ()


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
        write_json(folder / SWEEP_FILE, content, indent=2)

    def as_csv(self) -> str:
        """Return the content of ``sweep.csv``: a line of names, then one line a job."""
        text = io.StringIO()
        names = [one.name for one in fields(SweepJob) if one.name != "sweep"]
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        for row in self.jobs:
            cells = row.as_json().items()
            writer.writerow({name: _cell(value) for name, value in cells})
        return text.getvalue()


def read_table(folder: Path) -> SweepTable | None:
    """Return the table in a sweep folder; None if there is none that can be read."""
    with contextlib.suppress(MalformedEvent):
        return from_json(SweepTable, read_object(folder / SWEEP_FILE))
    return None


@dataclass(frozen=True)
class Point:
    """What a sweep has tried: one job, or with ``repeat`` several that differ in their seeds."""

    number: int
    rows: tuple[SweepJob, ...]

    @property
    def values(self) -> list[float]:
        """The results of its jobs that completed, if they are numbers."""
        return [row.value for row in self.rows if row.value is not None]

    def best(self, sign: int) -> SweepJob:
        """Return the best of its jobs, one of which has a value."""
        known = [row for row in self.rows if row.value is not None]
        return max(known, key=lambda row: sign * (row.value or 0.0))


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


def point_table(points: Sequence[Point]) -> list[str]:
    """Return what each point has reached over its seeds; failed ones are named."""
    lines: list[Sequence[object]] = [
        ("trial", "mean ± std", "seeds", "overrides", ""),
    ]
    shared = [common([row.overrides for row in point.rows]) for point in points]
    everywhere = common(shared)
    for point, own in zip(points, shared, strict=True):
        values = point.values
        spread = f" ± {stdev(values):.3g}" if len(values) > 1 else ""
        failed = ", ".join(
            _without(row.overrides, own) for row in point.rows if row.has_failed
        )
        lines.append(
            (
                point.number,
                f"{fmean(values):.6g}{spread}" if values else "-",
                f"{len(values)} of {len(point.rows)}",
                _without(own, everywhere),
                f"without {failed}" if failed else "",
            )
        )
    return aligned(lines)


def screen_table(
    rows: Sequence[SweepJob],
    values: Mapping[int, float] | None = None,
    size: tuple[int, int] | None = None,
) -> list[str]:
    """Return jobs in plain columns; of the overrides only those in which they differ.

    ``values``: what jobs that run have reported last, by number. ``size``: the columns and lines of
    the terminal that the table, with its tally, is to fit: running jobs are kept first.
    """
    pairs = list(zip(rows, differing(rows), strict=True))
    if size is not None:
        ranked = sorted(rows, key=_rank)[: max(size[1] - _OTHER_LINES, 1)]
        pairs = [(row, own) for row, own in pairs if row in ranked]
    cells = [_cells(row, own, values or {}) for row, own in pairs]
    table = aligned([COLUMNS, *cells])
    if size is None:
        return table
    too_wide = max(map(len, table)) - size[0]
    if too_wide > 0:
        room = max(len(str(own)) for _, own, *_ in cells) - too_wide
        room = max(room, _LEAST_COLUMNS)
        cut = [[job, shortened(str(own), room), *rest] for job, own, *rest in cells]
        table = aligned([COLUMNS, *cut])
    hidden = len(rows) - len(pairs)
    counts = ", ".join(f"{n} {status}" for status, n in _counts(rows).items())
    more = f" ({hidden} not shown)" if hidden else ""
    return [*table, f"{len(rows)} jobs: {counts}{more}"]


def _rank(row: SweepJob) -> int:
    """Return which rows a small table leaves out first: those that completed, then waiting ones."""
    ranks = {NOT_STARTED: 2, COMPLETED: 3, PRUNED: 3}
    return 0 if row.is_running else ranks.get(row.status, 1)


def _cells(
    row: SweepJob,
    overrides: str,
    values: Mapping[int, float],
) -> list[object]:
    of = "" if row.total_steps is None else f"/{row.total_steps}"
    result = row.result
    if row.is_running and row.job is not None:
        result = values.get(row.job)
    wall = row.wall_seconds
    return [
        "?" if row.job is None else row.job,
        overrides,
        f"{row.status.replace('_', ' ')}{' earlier' if row.reused else ''}",
        row.attempts or None,
        ",".join(row.devices),
        row.batch_size,
        None if row.step is None else f"{row.step}{of}",
        short_result(result),
        None if wall is None else f"{wall:.1f} s",
    ]


def _counts(rows: Sequence[SweepJob]) -> Counter[str]:
    return Counter(row.status.replace("_", " ") for row in rows)


def common(overrides: Sequence[Sequence[str]]) -> list[str]:
    """Return the overrides that all jobs have; none of a single job."""
    if len(overrides) < 2:
        return []
    everywhere = set.intersection(*map(set, overrides))
    return [one for one in overrides[0] if one in everywhere]


def differing(rows: Sequence[SweepJob]) -> list[str]:
    """Return each job's overrides without those that all have; a single job keeps its own."""
    same = common([row.overrides for row in rows])
    return [_without(row.overrides, same) for row in rows]


def _without(overrides: Sequence[str], others: Sequence[str]) -> str:
    return " ".join(public_command([one for one in overrides if one not in others]))


def tally(rows: Sequence[SweepJob]) -> str:
    """Return one line: how many jobs ended how."""
    counts = _counts(rows)
    done = counts.pop(COMPLETED, 0)
    others = "".join(f", {n} {status}" for status, n in sorted(counts.items()))
    return f"{done} of {len(rows)} completed{others}"


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
