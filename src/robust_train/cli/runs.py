"""``robust-train status | checkpoint | halve-batch | stop | wait | sweep``: shows a job or a sweep,
and sends requests to it.

Each function runs in the command's process. It reads the run folder, and writes a request into that
folder for a live run, which answers there. ``logs`` and ``attach`` are in ``cli/output.py``.
"""

from __future__ import annotations

import os
import shlex
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from robust_train.cli.command import Answer, Table, UsageError
from robust_train.cli.ps import has_died
from robust_train.folder import live, requests
from robust_train.folder.lock import is_alive, is_held, left_of
from robust_train.folder.run_list import (
    DIED,
    NO_ANSWER,
    KnownRun,
    choose_run,
    find_live_runs,
    read_run,
    sweep_at,
)
from robust_train.folder.state import lacked_by_json, read_summary
from robust_train.host.linux import describe_processes, end_processes_of
from robust_train.host.signals import ORPHAN_GRACE_SECONDS
from robust_train.model.errors import EXIT_FAILED, NotDoneError
from robust_train.model.events import Json
from robust_train.model.spec import MINIMIZE
from robust_train.readable import counted, duration, mib, number, of_all, shorten
from robust_train.report.wording import batch_in_words
from robust_train.sweep.record import SweepTable, read_rows, read_table, select_job_overrides
from robust_train.sweep.table import best_first, screen_table, short_result, values_of

# Fields that ``status`` shows under their own name.
_FACTS = (
    "exit_code",
    "run_dir",
    "host",
    "pid",
    "attempt",
    "attempt_pid",
    "device",
    "effective_batch_size",
    "loss",
    "checkpoint",
)
POLL_SECONDS = 0.3

# What a live run has done, for each request.
_SENTENCES = {
    "checkpoint": "{run.id}: checkpoint of step {step}: {path}",
    "halve_batch": "{run.id}: micro-batch {before[micro_batch]} → {after[micro_batch]}, {how}",
}


def status(arguments: Namespace) -> Answer:
    """Show the state of a run, which may have ended, or of a sweep and its jobs."""
    sweep = sweep_at(arguments.which)
    if sweep is not None:
        return _sweep_status(sweep)
    run = choose_run(arguments.which, dead_too=True)
    fields = live.status(run)
    facts = {
        "run": run.id,
        "job": fields.get("name"),
        "state": _describe_state(run, fields),
        "why": _find_reason(fields),
        "batch": None,
        "time": None,
        "step": of_all(fields.get("step"), fields.get("total_steps")),
        **{name.replace("_", " "): fields.get(name) for name in _FACTS},
    }
    if run.state is not None and run.state.attempt is not None:
        facts["batch"] = batch_in_words(run.state.attempt)
    if "seconds" in fields:
        facts["time"] = duration(fields["seconds"])
    if fields.get("loss") is not None:
        facts["loss"] = number(fields["loss"])
    if run.alive:
        facts["slow"] = fields.get("slow")
    memory = fields.get("memory") or {}
    facts["memory"] = ", ".join(f"{name} {mib(taken)}" for name, taken in memory.items())
    if run.is_unfinished:
        facts["to continue"] = f"robust-train resume {run.id}"
    rows = [(name, str(value)) for name, value in facts.items() if value not in (None, False, "")]
    return Answer({"run": run.id, **fields}, [Table(("what", "value"), rows)])


def _describe_state(run: KnownRun, fields: dict[str, Json]) -> str:
    """Return a run's state, and for how long it has been in it."""
    state = str(fields["state"])
    if state == NO_ANSWER:
        # No one knows since when.
        return f"{state}: stopped by Ctrl-Z; fg or kill -CONT {run.pid} continues it"
    if "last_state" in fields:
        return f"{state}; the last state was {fields['last_state']}"
    if run.alive:
        return f"{state} for {duration(fields.get('seconds_in_state', 0.0))}"
    return state


def _find_reason(fields: dict[str, Json]) -> Json:
    """Return why a run waits, or why it ended, or None."""
    waiting = fields.get("waiting") or {}
    if waiting.get("reason"):
        return waiting["reason"]
    return None if fields["state"] == "running" else fields.get("reason")


def _sweep_status(folder: Path) -> Answer:
    """Show the state of a sweep, and a row for each of its jobs that has started."""
    _, table = _read_sweep(str(folder))
    rows = table.jobs if table.jobs else tuple(read_rows(folder, table.sweep))
    state = DIED if has_died(folder, table) else table.status
    data: dict[str, Json] = {
        "sweep": str(folder),
        "state": state,
        "exit_code": table.exit_code,
        "jobs": [row.as_row() for row in rows],
    }
    shown = [f"{folder}: {state}", *screen_table(rows)]
    if state == DIED or table.exit_code:
        shown.append(f"to continue: robust-train resume {folder}")
    return Answer(data, shown)


def request(arguments: Namespace) -> Answer:
    """Send the request that the command names to a live run, and wait for its answer."""
    run = choose_run(arguments.which, command=arguments.command)
    verb = arguments.command.replace("-", "_")
    answer = live.ask(run, verb)
    sentence = _SENTENCES[verb].format(run=run, **answer)
    return Answer({"run": run.id, **answer}, [sentence])


def stop(arguments: Namespace) -> Answer:
    """Ask a live run, or a sweep with its jobs, to save checkpoints and end."""
    sweep = sweep_at(arguments.which)
    if sweep is not None:
        return _stop_sweep(sweep)
    run = choose_run(arguments.which, command="stop")
    if run.is_orphaned:
        return _stop_orphaned(run, now=arguments.now)
    answer = live.ask(run, "stop", now=arguments.now)
    sentence = f"{run.id} (pid {run.pid}, {answer['before']}) stops and will exit with 143"
    return Answer({"run": run.id, **answer}, [sentence])


def _stop_orphaned(run: KnownRun, *, now: bool) -> Answer:
    """End the remaining processes of a run whose launcher was killed."""
    assert run.holder is not None
    ended = describe_processes(left_of(run.holder))
    grace_seconds = 0.0 if now else ORPHAN_GRACE_SECONDS
    left = end_processes_of(run.holder.job, os.geteuid(), grace_seconds)
    if left:
        raise NotDoneError(f"{run.id}: {describe_processes(left)} does not end")
    if is_held(run.run_dir):
        raise NotDoneError(f"{run.id}: a process that is not visible here does not end")
    sentence = f"{run.id}: its launcher was killed; ended the remaining processes: {ended}"
    data = {"run": run.id, "before": run.status, "after": DIED}
    return Answer(data, [sentence])


def _stop_sweep(folder: Path) -> Answer:
    jobs = [run.id for run in find_live_runs() if folder in run.run_dir.parents]
    try:
        if not jobs and is_held(folder) is False:
            raise requests.RefusedError("this sweep has ended")
        requests.request_sweep_stop(folder)
    except (OSError, requests.RefusedError) as error:
        raise NotDoneError(f"{folder}: {error}") from error
    count = counted(len(jobs), "job")
    sentence = f"{folder}: {count} will save a checkpoint and end; no other job is started"
    data = {"sweep": str(folder), "jobs": jobs, "after": "stopping"}
    return Answer(data, [sentence])


def wait(arguments: Namespace) -> int:
    """Wait for each job or sweep. Return the exit code of the first that did not complete, or
    0."""
    folders = []
    for which in arguments.which or [None]:
        sweep = sweep_at(which)
        if sweep is None:
            run = choose_run(which, dead_too=True, command="wait")
            folders.append(run.run_dir)
        else:
            folders.append(sweep)
    codes = [wait_for(folder) for folder in folders]
    failures = [code for code in codes if code != 0]
    return failures[0] if failures else 0


def wait_for(folder: Path) -> int:
    """Wait for the job or sweep in a folder, print how it ended, and return its exit code."""
    if (folder / requests.SWEEP_FILE).is_file():
        return _wait_for_sweep(folder)
    while (run := read_run(folder)) is not None and run.alive:
        time.sleep(POLL_SECONDS)
    if run is None:
        raise NotDoneError(f"{folder} is gone")
    state = run.state
    reason = "" if state is None else shorten(state.reason or "", 200)
    because = f": {reason}" if reason else ""
    print(f"{run.id} {run.status}{because}; {folder}")
    code = state.exit_code if state is not None and state.is_final else None
    return EXIT_FAILED if code is None else code


def _wait_for_sweep(folder: Path) -> int:
    while is_alive(folder, has_ended=_read_exit_code(folder) is not None):
        time.sleep(POLL_SECONDS)
    code = _read_exit_code(folder)
    if code is None:
        print(f"{folder}: died")
        return EXIT_FAILED
    print(f"{folder}: ended with exit code {code}")
    return code


def _read_exit_code(sweep_folder: Path) -> int | None:
    """Return the exit code that a sweep recorded, or None."""
    table = read_table(sweep_folder)
    return None if table is None else table.exit_code


def _read_sweep(path: str) -> tuple[Path, SweepTable]:
    """Return the folder and the record of a sweep.

    Raises:
        UsageError: the folder is not a sweep folder.
    """
    folder = Path(path).resolve()
    table = read_table(folder)
    if table is None:
        raise UsageError(f"{folder}: not a sweep folder")
    return folder, table


def limit(arguments: Namespace) -> Answer:
    """Change how many jobs of a sweep run at once."""
    folder, table = _read_sweep(arguments.path)
    number = arguments.number
    try:
        if table.launcher != "gpu_queue":
            raise requests.RefusedError(
                f"hydra/launcher={table.launcher} decides itself how many jobs run at once; "
                "gpu_queue and our sweepers read this number"
            )
        if is_held(folder) is False:
            raise requests.RefusedError("this sweep has ended")
        requests.request_sweep_limit(folder, number)
    except (OSError, requests.RefusedError) as error:
        raise NotDoneError(f"{folder}: {error}") from error
    data: dict[str, Json] = {"sweep": str(folder), "limit": number}
    most = f"at most {counted(number, 'job')} at once from now on"
    return Answer(data, [f"{folder}: {most}"])


def best(arguments: Namespace) -> Answer:
    """Return the best job of a sweep: its overrides, or the path of its checkpoint."""
    folder, table = _read_sweep(arguments.path)
    # The jobs' folders have newer rows than the sweep's record, and the sweep may have been moved.
    rows = read_rows(folder, table.sweep)
    direction = MINIMIZE if arguments.minimize else table.direction
    table = replace(table, jobs=tuple(rows) or table.jobs, direction=direction)
    groups = list(best_first(table))
    repeats = [row for row in groups[0] if row.value is not None] if groups else []
    if not repeats:
        raise NotDoneError(f"{folder}: no job has completed with a number")
    row = max(repeats, key=lambda row: table.sign * (row.value or 0.0))
    summary = read_summary(row.path)
    checkpoint = None
    if summary is not None and summary.checkpoint is not None:
        checkpoint = str(summary.checkpoint)
    data: dict[str, Json] = {
        "job": row.job,
        "direction": direction,
        "result": row.result,
        **lacked_by_json(row.result),
        "values": values_of(repeats),
        "overrides": row.overrides,
        "folder": row.folder,
        "checkpoint": checkpoint,
    }
    # Overrides that concern the sweep itself are left out. For example, a command with detach=true
    # would run in the background.
    words = shlex.join(select_job_overrides(row.overrides))
    shown = checkpoint if arguments.checkpoint else words
    if shown is None and not arguments.json:
        raise NotDoneError(f"{row.folder}: job {row.job} has reported no checkpoint")
    which = f"job {row.job}, which has the {table.best_is} result: {short_result(row.value)}"
    return Answer(data, [str(shown)], asides=[which])
