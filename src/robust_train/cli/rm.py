"""``robust-train rm``: removes run folders of jobs that completed long ago.

Only folders on the user's list of runs are removed, and only after a question. A folder stays if a
job runs in it, if the user is in it, or if it contains files that are older than the job.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from argparse import Namespace
from pathlib import Path

from robust_train.cli.command import Answer, Table, ask_user
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
        size, why_kept = _inspect(run)
        if why_kept is not None:
            kept.append(f"{run.run_dir} stays: {why_kept}")
            continue
        removable.append(
            {"id": run.id, "run_dir": str(run.run_dir), "age_seconds": round(age), "bytes": size}
        )
        rows.append((run.id, run.status, state.name, duration(age), mib(size), run.run_dir))
    if not rows:
        which = "ended" if arguments.all else "completed"
        shown = (
            "no run folder of yours can be removed: only folders of jobs that "
            f"{which} {arguments.days:g} days ago or earlier are removed"
        )
    else:
        if not arguments.json:
            Table(_COLUMNS, rows).print()
        shown = f"would remove {_describe_size(removable)} (--dry-run)"
        if not arguments.dry_run:
            if not ask_user(f"remove {_describe_size(removable)}?", arguments):
                return Answer(shown=["nothing was removed"], exit_code=EXIT_FAILED)
            removable = [run for run in removable if _remove(Path(run["run_dir"]), kept)]
            shown = f"removed {_describe_size(removable)}"
    data = {"dry_run": arguments.dry_run, "runs": removable, "kept": kept}
    return Answer(data, [shown], kept)


def _describe_size(folders: list[dict[str, Json]]) -> str:
    """Return the number of run folders and their size, such as ``2 run folders, 31 MiB``."""
    size = sum(run["bytes"] for run in folders)
    return f"{counted(len(folders), 'run folder')}, {mib(size)}"


def _remove(folder: Path, kept: list[str]) -> bool:
    """Remove a run folder, and return whether that succeeded. If not, add the reason to
    ``kept``."""
    # A job may have started in the folder since the question.
    run = read_run(folder)
    if run is not None and run.alive:
        kept.append(f"{folder} stays: a job runs in it")
        return False
    try:
        shutil.rmtree(folder)
    except OSError as error:
        kept.append(f"{folder} is not removed: {error.strerror or error}")
        return False
    # The folder of the day goes with its last run folder. Otherwise it is not empty.
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
    return True


def _inspect(run: KnownRun) -> tuple[int, str | None]:
    """Return a run folder's size, and the reason why it must stay, or None."""
    size = 0
    started = run.state.started if run.state else 0.0
    here = Path.cwd()
    if run.run_dir in {here, Path.home()}.union(here.parents):
        return size, "it is your current or home folder"
    try:
        # The state has the start of the latest launch, and the journal that of the first.
        with contextlib.suppress(FileNotFoundError):
            first_line = next(json_lines(run.run_dir / "journal.jsonl"), None) or {}
            started = finite(first_line.get("time")) or started
        for path in run.run_dir.rglob("*"):
            status = path.lstat()
            size += status.st_blocks * 512
            if status.st_mtime < started - 60:
                return size, f"{path} is older than the job"
    except OSError as error:
        return size, f"{error.filename}: {error.strerror}"
    return size, None
