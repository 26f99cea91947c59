"""``robust-train rm``: remove run folders of jobs that completed long ago."""

from __future__ import annotations

import contextlib
import shutil
import time
from argparse import Namespace
from pathlib import Path

from robust_train.cli.command import Answer, Table, confirmed
from robust_train.files import json_lines
from robust_train.folder.run_list import KnownRun, find_runs, read_run
from robust_train.model.errors import EXIT_FAILED
from robust_train.model.events import Json
from robust_train.model.json import finite
from robust_train.readable import counted, duration, mib

_COLUMNS = ("id", "state", "job", "age", "size", "run folder")
_DAY_SECONDS = 86400.0


def remove_runs(arguments: Namespace) -> Answer:
    """List the run folders of old jobs, ask, and remove them."""
    now = time.time()
    rows = []
    kept = []
    removable: list[dict[str, Json]] = []
    for run in find_runs():
        state = run.state
        if state is None or run.alive or not run.is_here:
            continue
        age = now - state.updated
        if age < arguments.days * _DAY_SECONDS or (run.is_unfinished and not arguments.all):
            continue
        size, why_not = _inside(run)
        if why_not:
            kept.append(f"{run.run_dir} stays: {why_not}")
            continue
        removable.append(
            {"id": run.id, "run_dir": str(run.run_dir), "age_seconds": round(age), "bytes": size}
        )
        rows.append((run.id, run.status, state.name, duration(age), mib(size), run.run_dir))
    if not rows:
        which = "ended" if arguments.all else "completed"
        shown = (
            "there is no run folder of yours to remove: only those of jobs that "
            f"{which} {arguments.days:g} days ago or earlier are removed"
        )
    else:
        if not arguments.json:
            Table(_COLUMNS, rows).print()
        shown = f"would remove {_counted(removable)} (--dry-run)"
        if not arguments.dry_run:
            if not confirmed(f"remove {_counted(removable)}?", arguments):
                return Answer(shown=["nothing was removed"], exit_code=EXIT_FAILED)
            removable = [run for run in removable if _remove(Path(run["run_dir"]), kept)]
            shown = f"removed {_counted(removable)}"
    data = {"dry_run": arguments.dry_run, "runs": removable, "kept": kept}
    return Answer(data, [shown], kept)


def _counted(folders: list[dict[str, Json]]) -> str:
    """Return how many run folders there are and their size."""
    size = sum(run["bytes"] for run in folders)
    return f"{counted(len(folders), 'run folder')}, {mib(size)}"


def _remove(folder: Path, kept: list[str]) -> bool:
    """Remove a run folder. Returns whether it was removed, and adds the reason to ``kept`` if
    not."""
    run = read_run(folder)  # The run may have changed since the question.
    if run is not None and run.alive:
        kept.append(f"{folder} stays: a job runs in it")
        return False
    try:
        shutil.rmtree(folder)
    except OSError as error:
        kept.append(f"{folder} is not removed: {error.strerror or error}")
        return False
    with contextlib.suppress(OSError):
        folder.parent.rmdir()  # the day's folder, if this was its last
    return True


def _inside(run: KnownRun) -> tuple[int, str]:
    """Return a run folder's size, and why it must stay: it is in use, or holds files that are older
    than the job. Empty if it may go."""
    size = 0
    began = run.state.started if run.state else 0.0
    here = Path.cwd()
    if run.run_dir in {here, Path.home()}.union(here.parents):
        return size, "it is where you are"
    try:
        with contextlib.suppress(FileNotFoundError):
            lines = json_lines(run.run_dir / "journal.jsonl")
            began = finite((next(lines, None) or {}).get("time")) or began
        for path in run.run_dir.rglob("*"):
            status = path.lstat()
            size += status.st_blocks * 512
            if status.st_mtime < began - 60:
                return size, f"{path} is older than the job"
    except OSError as error:
        return size, f"{error.filename}: {error.strerror}"
    return size, ""
