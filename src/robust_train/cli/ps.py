"""``robust-train ps``: lists the user's jobs and sweeps, one per line, the newest last."""

from __future__ import annotations

import os
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from robust_train.cli.command import Answer, Table, UsageError
from robust_train.folder import run_list
from robust_train.folder.lock import is_alive
from robust_train.folder.requests import SWEEP_FILE
from robust_train.folder.run_list import DIED, KnownRun, find_runs, sweep_at
from robust_train.folder.state import lacked_by_json, read_summary
from robust_train.model.errors import EXIT_BAD_CONFIG
from robust_train.model.events import Json
from robust_train.readable import align_columns, counted, duration, of_all, shorten
from robust_train.sweep.record import SweepTable, read_record, read_table
from robust_train.sweep.table import common, short_result, without

USUALLY = 20  # lines that are shown without --all
_COLUMNS = ("id", "state", "age", "result", "job", "run folder")
_USUAL_WIDTH = 80  # columns of a terminal; a narrower terminal gets shorter job names
_LONGEST_NAME = 16
_SHORT_NAME = 8
_SHORTEST_FOLDER = 8
_NOW_SECONDS = 10.0


@dataclass(frozen=True)
class Line:
    """One line of the list: a run, or a sweep with its jobs."""

    runs: Sequence[KnownRun]  # the oldest first
    sweep: Path | None = None

    @property
    def started(self) -> float | None:
        """When the first of the runs started, in seconds of the epoch."""
        times = [run.state.started for run in self.runs if run.state is not None]
        return min(times) if times else None


def list_jobs(arguments: Namespace) -> Answer:
    """List the user's jobs, live and past, the newest last, and how to resume jobs that died."""
    runs = [run for run in find_runs() if run.alive or not arguments.live]
    if arguments.which is not None:
        return _list_jobs_of_sweep(arguments, runs)
    if not runs:
        which = "is alive" if arguments.live else "is on the list"
        nothing = f"no run of yours {which} in {run_list.state_directory()}"
        return Answer({"runs": []}, [nothing])
    shows_all = arguments.all or arguments.live
    trained = runs if shows_all else [run for run in runs if not _was_refused(run)]
    lines = _group_by_sweep(trained)
    shown = lines if shows_all else lines[-USUALLY:]
    parts: list[str | Table] = [_make_table([_row(line) for line in shown], arguments.paths)]
    for line in shown:
        hint = _resume_hint(line)
        if hint is not None:
            parts.append(hint)
    refused = len(runs) - len(trained)
    if refused:
        parts.append(f"refused before training: {counted(refused, 'job')}; --all shows them")
    older = len(lines) - len(shown)
    if older:
        parts.append(f"older: {older}; --all shows them")
    if any(line.sweep is not None for line in shown):
        parts.append("the jobs of a sweep: robust-train ps FOLDER")
    newest_first = runs[::-1]
    if not shows_all:
        newest_first = newest_first[:USUALLY]
    return Answer({"runs": [run_as_json(run) for run in newest_first]}, parts)


def run_as_json(run: KnownRun) -> dict[str, Json]:
    """Return a run as ``--json`` lists it, with the result of a completed run."""
    fields = run.about()
    if run.status == "completed" and (summary := read_summary(run.run_dir)) is not None:
        fields["result"] = summary.objective
        fields |= lacked_by_json(summary.objective)
    return fields


def _list_jobs_of_sweep(arguments: Namespace, runs: Sequence[KnownRun]) -> Answer:
    """List the jobs of a sweep. Their names are the overrides in which they differ."""
    sweep = sweep_at(arguments.which)
    if sweep is None:
        raise UsageError(f"{arguments.which}: not a sweep folder")
    jobs = [run for run in runs if sweep in run.run_dir.parents]
    if not jobs:
        raise UsageError(f"{sweep}: no job of this sweep is on your list")
    records = [read_record(run.run_dir) for run in jobs]
    overrides = [() if record is None else record.overrides for record in records]
    same = common(overrides)
    rows = []
    for run, words in zip(jobs, overrides, strict=True):
        row = _row(Line([run]))
        differences = without(words, same)
        if differences:
            row[_COLUMNS.index("job")] = differences
        rows.append(row)
    data: dict[str, Json] = {"runs": [run_as_json(run) for run in jobs[::-1]]}
    return Answer(data, [_make_table(rows, arguments.paths)])


def _was_refused(run: KnownRun) -> bool:
    """Return whether a run ended before its first attempt, because of a mistake in its command."""
    state = run.state
    if run.alive or state is None:
        return False
    return state.exit_code == EXIT_BAD_CONFIG and state.attempt is None


def _group_by_sweep(runs: Sequence[KnownRun]) -> list[Line]:
    """Return a line for each sweep, and for each run that belongs to no sweep, the newest last."""
    jobs_of_sweeps: dict[Path, list[KnownRun]] = {}
    lines = []
    for run in runs:
        sweep = _find_sweep(run)
        if sweep is None:
            lines.append(Line([run]))
            continue
        if sweep not in jobs_of_sweeps:
            jobs_of_sweeps[sweep] = []
            lines.append(Line(jobs_of_sweeps[sweep], sweep))
        jobs_of_sweeps[sweep].append(run)
    # A sweep is as new as its newest job.
    positions = {id(run): number for number, run in enumerate(runs)}
    return sorted(lines, key=lambda line: positions[id(line.runs[-1])])


def _find_sweep(run: KnownRun) -> Path | None:
    """Return the folder of the sweep that a run belongs to, or None."""
    for folder in run.run_dir.parents[:3]:
        if (folder / SWEEP_FILE).is_file():
            return folder
    return None


def _row(line: Line) -> list[object]:
    """Return the cells of a line. The last cell is the whole path of the folder."""
    age = None if line.started is None else _short_age(time.time() - line.started)
    if line.sweep is not None:
        done = sum(run.status in ("completed", "pruned") for run in line.runs)
        result = f"{done} of {counted(len(line.runs), 'job')}"
        return ["sweep", _sweep_state(line.sweep), age, result, line.sweep.name, line.sweep]
    (run,) = line.runs
    fields = run_as_json(run)
    state = run.status if run.is_here else f"{run.status} on {fields['host']}"
    return [run.id, state, age, _result(fields), fields.get("name"), run.run_dir]


def _result(fields: Mapping[str, Json]) -> str | None:
    """Return the result of a completed run, or the step that a run has reached."""
    if fields.get("result") is not None:
        return short_result(fields["result"])
    step = of_all(fields.get("step"), fields.get("total_steps"))
    return f"step {step}" if step else None


def _short_age(seconds: float) -> str:
    """Return a time in its largest unit only, such as ``3 h``."""
    if seconds < _NOW_SECONDS:
        return "now"
    number, unit, *_ = duration(seconds).split()
    return f"{number} {unit}"


def _sweep_state(folder: Path) -> str:
    table = read_table(folder)
    if table is None or has_died(folder, table):
        return DIED
    return table.status


def has_died(folder: Path, table: SweepTable) -> bool:
    """Return whether a sweep ended without recording an exit code."""
    return table.exit_code is None and not is_alive(folder, has_ended=False)


def _resume_hint(line: Line) -> str | None:
    """Return a sentence with the command that resumes a dead job or sweep, or None."""
    if line.sweep is not None:
        if _sweep_state(line.sweep) != DIED:
            return None
        return f"{line.sweep} died; to continue: robust-train resume {line.sweep}"
    (run,) = line.runs
    if run.status != DIED or run.state is None:
        return None
    return f"{run.id} died: {run.why_died}; to continue: robust-train resume {run.id}"


def _make_table(rows: Sequence[list[object]], whole_paths: bool) -> Table:
    """Return the rows as a table that fits the terminal. In a pipe, or on request, job names and
    paths are not shortened."""
    if whole_paths or not sys.stdout.isatty():
        return Table(_COLUMNS, rows)
    width = shutil.get_terminal_size().columns
    longest_name = _LONGEST_NAME if width >= _USUAL_WIDTH else _SHORT_NAME
    cells = []
    for *first_cells, name, _ in rows:
        cells.append([*first_cells, shorten(str(name or ""), longest_name)])
    lines_without_folder = align_columns(cells, _COLUMNS[:-1])
    room = width - max(len(line) for line in lines_without_folder) - 2
    room = max(room, _SHORTEST_FOLDER)
    for shortened_row, row in zip(cells, rows, strict=True):
        shortened_row.append(short_folder(Path(str(row[-1])), room))
    return Table(_COLUMNS, cells)


def short_folder(folder: Path, longest: int) -> str:
    """Return a folder relative to the working directory or to the home folder, if it is below. A
    longer text is cut at its start, because folders differ in the dates and numbers at the end."""
    text = str(folder)
    for base, prefix in ((Path.cwd(), ""), (Path(os.path.expanduser("~")), "~/")):
        if folder != base and folder.is_relative_to(base):
            text = prefix + str(folder.relative_to(base))
            break
    return text if len(text) <= longest else "…" + text[1 - longest :]
