"""``robust-train runs``, ``run list | status | checkpoint | halve-batch | stop``."""

from __future__ import annotations

import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from robust_train.cli.command import Answer, CommandFailed, Table
from robust_train.folder import requests
from robust_train.folder.lock import is_held
from robust_train.folder.run_list import (
    DIED,
    Run,
    choose_run,
    find_live_runs,
    find_runs,
    state_directory,
)
from robust_train.folder.state import read_summary
from robust_train.model.events import Json
from robust_train.readable import as_clock, mib, shortened
from robust_train.sweep.record import short_result

COLUMNS = ("id", "state", "job", "where", "step", "time", "result", "run folder")
_RIGHT = {"step", "time"}
USUALLY = 20

About = dict[str, Json]  # State of a run, or its answer, as `--json` prints it


def list_live(arguments: Namespace) -> Answer:
    """List the user's live runs, the newest first."""
    live = find_live_runs()[::-1]
    nothing = (
        "no run of yours is alive on this machine; robust-train runs lists earlier ones"
    )
    return _listed(live, nothing)


def list_all(arguments: Namespace) -> Answer:
    """List the user's jobs, live and past, the newest first."""
    found = find_runs()[::-1]
    most = len(found) if arguments.all else USUALLY
    return _listed(
        found, f"no run of yours is on the list in {state_directory()}", most
    )


def _listed(runs: Sequence[Run], nothing: str, most: int | None = None) -> Answer:
    """Show the first ``most`` of these runs, and how those that were interrupted go on."""
    shown = runs[:most]
    data = {"runs": [{**run.about(), **_result(run)} for run in shown]}
    if not runs:
        return Answer(data, [nothing])
    lines = _fitted(Table(COLUMNS, [_row(run) for run in shown], _RIGHT))
    if len(shown) < len(runs):
        lines.append(f"older runs: {len(runs) - len(shown)}; --all shows them")
    for run in shown:
        if run.status == DIED and run.state is not None and run.state.resume_command:
            lines.append(f"{run.id} was interrupted: {run.why_died}. To go on:")
            lines.append(f"  {run.state.resume_command}")
    return Answer(data, lines)


def _fitted(table: Table) -> list[str]:
    """Return one line a job; on a terminal without the folder if that does not fit."""
    lines = table.plain_lines()
    width = shutil.get_terminal_size().columns
    if not sys.stdout.isatty() or max(map(len, lines)) <= width:
        return lines
    narrow = Table(
        table.columns[:-1], [row[:-1] for row in table.rows], table.right_aligned
    )
    return [line[:width] for line in narrow.plain_lines()]


def _row(run: Run) -> list[str]:
    about, state = run.about(), run.state
    result = _result(run).get("result")
    reason = state.reason if state is not None and not run.alive else None
    cells = (
        run.id,
        "interrupted" if about["state"] == DIED else about["state"],
        about.get("name"),
        (about.get("device") or "-") + ("" if run.is_here else f" on {about['host']}"),
        _step(about),
        as_clock(int(about["seconds"])) if "seconds" in about else None,
        shortened(reason, 60) if reason and result is None else short_result(result),
        run.run_dir,
    )
    return ["-" if cell is None else str(cell) for cell in cells]


def _result(run: Run) -> dict[str, Json]:
    """Return ``result`` of a job that completed."""
    summary = read_summary(run.run_dir) if run.status == "completed" else None
    return {} if summary is None else {"result": summary.objective}


def _step(about: About) -> str | None:
    """Return ``12/400``, or ``12`` if the number of all steps is unknown."""
    step, total = about.get("step"), about.get("total_steps")
    if step is None:
        return None
    return str(step) if total is None else f"{step}/{total}"


def status(arguments: Namespace) -> Answer:
    """Show the state of a run, which may have ended."""
    run = choose_run(arguments.run or arguments.which, dead_too=True)
    about = requests.status(run)
    rows = [
        [name, str(value)] for name, value in _facts(run, about) if value is not None
    ]
    return Answer({"run": run.id, **about}, [Table(("what", "value"), rows)])


def checkpoint(arguments: Namespace) -> Answer:
    """Have a live run save a checkpoint."""
    run = choose_run(arguments.run or arguments.which)
    answer = requests.ask(run, "checkpoint", wait_seconds=arguments.wait)
    sentence = f"{run.id}: checkpoint of step {answer['step']}: {answer['path']}"
    return Answer({"run": run.id, **answer}, [sentence])


def halve_batch(arguments: Namespace) -> Answer:
    """Have a live run continue with half the micro-batch."""
    run = choose_run(arguments.run or arguments.which)
    answer = requests.ask(run, "halve_batch", wait_seconds=arguments.wait)
    before, after = answer["before"]["micro_batch"], answer["after"]["micro_batch"]
    sentence = f"{run.id}: micro-batch {before} → {after}, {answer['how']}"
    return Answer({"run": run.id, **answer}, [sentence])


def stop(arguments: Namespace) -> Answer:
    """Have a live run, or a sweep with its jobs, save checkpoints and end."""
    which = arguments.run or arguments.which
    if which and os.path.isfile(Path(which) / "sweep.json"):
        return _stop_sweep(Path(which).resolve())
    run = choose_run(which)
    answer = requests.ask(run, "stop", now=arguments.now)
    sentence = (
        f"{run.id} (pid {run.pid}, {answer['before']}) stops and will exit with 143"
    )
    return Answer({"run": run.id, **answer}, [sentence])


def _stop_sweep(folder: Path) -> Answer:
    jobs = [run.id for run in find_live_runs() if folder in run.run_dir.parents]
    try:
        if not jobs and is_held(folder) is False:
            raise requests.Refused("this sweep has ended")
        requests.request_sweep_stop(folder)
    except (OSError, requests.Refused) as error:
        raise CommandFailed(f"{folder}: {error}") from error
    return Answer(
        {"sweep": str(folder), "jobs": jobs, "after": "stopping"},
        [
            f"{folder}: {len(jobs)} jobs save a checkpoint and end; no other job is started"
        ],
    )


def _facts(run: Run, about: About) -> list[tuple[str, Json]]:
    """Return what ``status`` shows, with None for what is unknown."""
    waiting = about.get("waiting") or {}
    state, loss, memory = about["state"], about.get("loss"), about.get("memory") or {}
    seconds = as_clock(int(about.get("seconds_in_state", 0)))
    since = f"{state} for {seconds}" if run.alive else state
    if "last_state" in about:
        since = f"{state}; the last state was {about['last_state']}, {seconds} long"
    return [
        ("run", about["id"]),
        ("job", about.get("name")),
        ("state", since),
        (
            "why",
            waiting.get("reason")
            or (None if state == "running" else about.get("reason")),
        ),
        ("position", waiting.get("position")),
        ("exit code", about.get("exit_code")),
        ("run folder", about["run_dir"]),
        ("host", None if run.is_here else about.get("host")),
        ("launcher pid", about["pid"]),
        ("attempt", about.get("attempt")),
        ("attempt pid", about.get("attempt_pid")),
        ("device", about.get("device")),
        ("batch", _batch(about)),
        ("effective batch", about.get("effective_batch_size")),
        ("step", _step(about)),
        ("loss", None if loss is None else f"{loss:.4g}"),
        ("last checkpoint", about.get("checkpoint")),
        (
            "memory",
            ", ".join(f"{name} {mib(size)}" for name, size in memory.items()) or None,
        ),
        ("started", f"{as_clock(int(about['seconds']))} ago" if run.alive else None),
    ]


def _batch(about: About) -> str | None:
    """Return ``64 × 2``, and into what recovery has split it."""
    size, split = about.get("batch_size"), about.get("micro_batch")
    if size is None:
        return None
    inside = "" if split is None or split == size else f", split into {split}"
    return f"{size} × {about['gradient_accumulation_steps']}{inside}"
