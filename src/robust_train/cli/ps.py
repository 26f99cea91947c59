"""``robust-train ps``: a line for each of the user's jobs and sweeps, the newest last."""

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
from robust_train.readable import aligned, counted, duration, of_all, shortened
from robust_train.sweep.record import SweepTable, read_record, read_table
from robust_train.sweep.table import common, short_result, without

USUALLY = 20
_COLUMNS = ("id", "state", "age", "result", "job", "run folder")
_USUAL_WIDTH = 80
_LONGEST_NAME = 16
_SHORT_NAME = 8
_LEAST_OF_A_FOLDER = 8
_NOW_SECONDS = 10.0


@dataclass(frozen=True)
class Listed:
    """One line: a run, or a sweep with those of its jobs that are on the list."""

    runs: Sequence[KnownRun]  # the oldest first
    sweep: Path | None = None

    @property
    def began(self) -> float | None:
        """When it began, in seconds of the epoch."""
        times = [run.state.started for run in self.runs if run.state is not None]
        return min(times) if times else None


def list_jobs(arguments: Namespace) -> Answer:
    """List the user's jobs, live and past, the newest last, and how to resume those that died."""
    runs = [run for run in find_runs() if run.alive or not arguments.live]
    whole = arguments.all or arguments.live
    if arguments.which is not None:
        return _jobs_of(arguments, runs)
    if not runs:
        which = "is alive" if arguments.live else "is on the list"
        nothing = f"no run of yours {which} in {run_list.state_directory()}"
        return Answer({"runs": []}, [nothing])
    trained = runs if whole else [run for run in runs if not _never_trained(run)]
    lines = _grouped(trained)
    shown = lines if whole else lines[-USUALLY:]
    parts: list[str | Table] = [_table([_row(line) for line in shown], arguments.paths)]
    parts += filter(None, map(_how_it_goes_on, shown))
    mistakes = len(runs) - len(trained)
    if mistakes:
        parts.append(f"refused before training: {counted(mistakes, 'job')}; --all shows them")
    older = len(lines) - len(shown)
    if older:
        parts.append(f"older: {older}; --all shows them")
    if any(line.sweep is not None for line in shown):
        parts.append("the jobs of a sweep: robust-train ps FOLDER")
    listed = [about_run(run) for run in runs[::-1]]
    return Answer({"runs": listed if whole else listed[:USUALLY]}, parts)


def about_run(run: KnownRun) -> dict[str, Json]:
    """Return a run as ``--json`` lists it, with the result of a completed run."""
    about = run.about()
    if run.status == "completed" and (summary := read_summary(run.run_dir)) is not None:
        about["result"] = summary.objective
        about |= lacked_by_json(summary.objective)
    return about


def _jobs_of(arguments: Namespace, runs: Sequence[KnownRun]) -> Answer:
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
        row = _row(Listed([run]))
        differences = without(words, same)
        if differences:
            row[_COLUMNS.index("job")] = differences
        rows.append(row)
    return Answer({"runs": [about_run(run) for run in jobs[::-1]]}, [_table(rows, arguments.paths)])


def _never_trained(run: KnownRun) -> bool:
    """Return whether a run was a mistake in a command, which no attempt has followed."""
    state = run.state
    if run.alive or state is None:
        return False
    return state.exit_code == EXIT_BAD_CONFIG and state.attempt is None


def _grouped(runs: Sequence[KnownRun]) -> list[Listed]:
    """Return a line for each run that is of no sweep and for each sweep, the newest last."""
    of_sweeps: dict[Path, list[KnownRun]] = {}
    lines = []
    for run in runs:
        sweep = next((up for up in run.run_dir.parents[:3] if (up / SWEEP_FILE).is_file()), None)
        if sweep is None:
            lines.append(Listed([run]))
            continue
        if sweep not in of_sweeps:
            of_sweeps[sweep] = []
            lines.append(Listed(of_sweeps[sweep], sweep))
        of_sweeps[sweep].append(run)
    # a sweep is as new as its newest job
    places = {id(run): number for number, run in enumerate(runs)}
    return sorted(lines, key=lambda line: places[id(line.runs[-1])])


def _row(line: Listed) -> list[object]:
    """Return the cells of a line. The last is the whole path of its folder."""
    age = None if line.began is None else _age(time.time() - line.began)
    if line.sweep is not None:
        done = sum(run.status in ("completed", "pruned") for run in line.runs)
        result = f"{done} of {counted(len(line.runs), 'job')}"
        return ["sweep", _state_of_sweep(line.sweep), age, result, line.sweep.name, line.sweep]
    (run,) = line.runs
    about = about_run(run)
    state = run.status if run.is_here else f"{run.status} on {about['host']}"
    return [run.id, state, age, _result(about), about.get("name"), run.run_dir]


def _result(about: Mapping[str, Json]) -> str | None:
    if about.get("result") is not None:
        return short_result(about["result"])
    step = of_all(about.get("step"), about.get("total_steps"))
    return f"step {step}" if step else None


def _age(seconds: float) -> str:
    """Return a time in its largest unit, as ``3 h``."""
    if seconds < _NOW_SECONDS:
        return "now"
    number, unit, *_ = duration(seconds).split()
    return f"{number} {unit}"


def _state_of_sweep(folder: Path) -> str:
    table = read_table(folder)
    if table is None or has_died(folder, table):
        return DIED
    return table.status


def has_died(folder: Path, table: SweepTable) -> bool:
    """Return whether a sweep has ended without recording how."""
    return table.exit_code is None and not is_alive(folder, has_ended=False)


def _how_it_goes_on(line: Listed) -> str:
    """Return a sentence with the command that resumes a dead job or sweep, otherwise empty."""
    if line.sweep is not None:
        died = _state_of_sweep(line.sweep) == DIED
        return f"{line.sweep} died; to continue: robust-train resume {line.sweep}" if died else ""
    (run,) = line.runs
    if run.status != DIED or run.state is None:
        return ""
    return f"{run.id} died: {run.why_died}; to continue: robust-train resume {run.id}"


def _table(rows: Sequence[list[object]], whole_paths: bool) -> Table:
    """Return the rows as a table that fits the terminal. In a pipe, or on request, paths are
    whole."""
    if whole_paths or not sys.stdout.isatty():
        return Table(_COLUMNS, rows)
    width = shutil.get_terminal_size().columns
    longest = _LONGEST_NAME if width >= _USUAL_WIDTH else _SHORT_NAME
    cut = [[*row[:4], shortened(str(row[4] or ""), longest), row[5]] for row in rows]
    others = aligned([row[:5] for row in cut], _COLUMNS[:5])
    room = width - max(map(len, others)) - 2
    room = max(room, _LEAST_OF_A_FOLDER)
    return Table(_COLUMNS, [[*row[:5], short_folder(Path(str(row[5])), room)] for row in cut])


def short_folder(folder: Path, longest: int) -> str:
    """Return a folder as it is seen from here or from home, with its end at most ``longest`` long.

    Folders differ at their ends, which have dates and numbers."""
    text = str(folder)
    for base, prefix in ((Path.cwd(), ""), (Path(os.path.expanduser("~")), "~/")):
        if folder != base and folder.is_relative_to(base):
            text = prefix + str(folder.relative_to(base))
            break
    return text if len(text) <= longest else "…" + text[1 - longest :]
