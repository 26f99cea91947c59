"""``robust-train clean``: remove run folders of jobs that completed long ago."""

from __future__ import annotations

import contextlib
import shutil
import time
from argparse import Namespace
from pathlib import Path

from robust_train.cli.command import Answer, Table, confirmed
from robust_train.files import json_lines
from robust_train.folder.run_list import KnownRun, find_runs
from robust_train.model.errors import EXIT_FAILED
from robust_train.model.events import Json
from robust_train.readable import duration, mib

_COLUMNS = ("id", "state", "job", "age", "size", "run folder")
_DAY_SECONDS = 86400.0


def clean(arguments: Namespace) -> Answer:
    """List the run folders of old jobs, ask, and remove them."""
    now = time.time()
    rows, kept = [], []
    folders: dict[Path, dict[str, Json]] = {}
    for run in find_runs():
        state = run.state
        if state is None or run.alive or not run.is_here:
            continue
        age = now - state.updated
        if age < arguments.days * _DAY_SECONDS or (
            run.is_unfinished and not arguments.all
        ):
            continue
        size, why_not = _inside(run)
        if why_not:
            kept.append(f"{run.run_dir} stays: {why_not}")
            continue
        folders[run.run_dir] = {
            "id": run.id,
            "run_dir": str(run.run_dir),
            "age_seconds": round(age),
            "bytes": size,
        }
        row = (
            run.id,
            run.status,
            state.name,
            duration(age),
            mib(size),
            run.run_dir,
        )
        rows.append(row)
    listed = [*folders.values()]
    data: dict[str, Json] = {
        "dry_run": arguments.dry_run,
        "runs": listed,
        "kept": kept,
    }
    if not rows:
        which = "ended" if arguments.all else "completed"
        nothing = (
            "no run folder of yours is to be removed: it would be one of a job that "
            f"{which} {arguments.days:g} days ago or earlier"
        )
        return Answer(data, [nothing], kept)
    number = "1 run folder" if len(rows) == 1 else f"{len(rows)} run folders"
    what = f"{number}, {mib(sum(one['bytes'] for one in listed))}"
    if not arguments.json:
        Table(_COLUMNS, rows).print()
    if arguments.dry_run:
        return Answer(
            data,
            [f"would remove {what} (--dry-run)"],
            kept,
        )
    if not confirmed(f"remove {what}?", arguments):
        return Answer(shown=["nothing was removed"], exit_code=EXIT_FAILED)
    for folder in folders:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            kept.append(f"{folder} is not removed: {error.strerror}")
        with contextlib.suppress(OSError):
            folder.parent.rmdir()  # the day's, if no other job has one
    return Answer(data, [f"removed {what}"], kept)


def _inside(run: KnownRun) -> tuple[int, str]:
    """Return a run folder's size, and why it is not to be removed: it is not the job's alone."""
    size, began = 0, run.state.started if run.state else 0.0
    with contextlib.suppress(OSError):
        first = next(json_lines(run.run_dir / "journal.jsonl"), None) or {}
        began = float(first.get("time", began))
    if run.run_dir in (Path.cwd(), Path.home(), *Path.cwd().parents):
        return size, "it is where you are"
    for path in run.run_dir.rglob("*"):
        status = path.lstat()
        size += status.st_blocks * 512
        if status.st_mtime < began - 60:
            return size, f"{path} is older than the job"
    return size, ""
