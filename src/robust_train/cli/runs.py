"""``robust-train status | logs | attach | wait | checkpoint | halve-batch | stop``: a user's jobs,
live and past.

Each function runs in the command's process. It reads the run folder, and asks a live run by a
request in that folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
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
from robust_train.host import screen
from robust_train.host.linux import end_processes_of, named
from robust_train.host.signals import ORPHAN_GRACE_SECONDS
from robust_train.model.errors import EXIT_FAILED, NotDoneError
from robust_train.model.events import Json
from robust_train.model.spec import MINIMIZE
from robust_train.readable import counted, duration, mib, number, of_all, shortened
from robust_train.report.wording import batch_in_words
from robust_train.sweep.record import SweepTable, read_rows, read_table, select_job_overrides
from robust_train.sweep.table import best_first, screen_table, short_result, values_of

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
CHUNK_BYTES = 1 << 20
_ATTACH_BYTES = 4096
_LOG = "attempt-{}.log"
_NAME = re.compile(r"attempt-(\d+)\.log")

_SENTENCES = {
    "checkpoint": "{run.id}: checkpoint of step {step}: {path}",
    "halve_batch": "{run.id}: micro-batch {before[micro_batch]} → {after[micro_batch]}, {how}",
}
"""Sentences on the requests that a live run has carried out."""

About = dict[str, Json]  # State of a run, or its answer, as `--json` prints it


def status(arguments: Namespace) -> Answer:
    """Show the state of a run, which may have ended, or of a sweep and its jobs."""
    sweep = sweep_at(arguments.which)
    if sweep is not None:
        return _sweep_status(sweep)
    run = choose_run(arguments.which, dead_too=True)
    about = live.status(run)
    state = about["state"]
    waiting = about.get("waiting") or {}
    since = f"{state} for {duration(about.get('seconds_in_state', 0.0))}"
    if "last_state" in about:
        since = f"{state}; the last state was {about['last_state']}"
    if state == NO_ANSWER:
        # The duration is unknown.
        since = f"{state}: stopped by Ctrl-Z; fg or kill -CONT {run.pid} continues it"
    attempt = None if run.state is None else run.state.attempt
    why = waiting.get("reason")
    if not why and state != "running":
        why = about.get("reason")
    loss = about.get("loss")
    memory = (about.get("memory") or {}).items()
    facts = {
        "run": run.id,
        "job": about.get("name"),
        "state": since if run.alive or "last_state" in about else state,
        "why": why,
        "batch": None if attempt is None else batch_in_words(attempt),
        "time": duration(about["seconds"]) if "seconds" in about else None,
        "step": of_all(about.get("step"), about.get("total_steps")),
        **{name.replace("_", " "): about.get(name) for name in _FACTS},
        "loss": loss if loss is None else number(loss),
        "slow": about.get("slow") if run.alive else None,
        "memory": ", ".join(f"{name} {mib(taken)}" for name, taken in memory),
        "to continue": f"robust-train resume {run.id}" if run.is_unfinished else None,
    }
    rows = [(name, str(value)) for name, value in facts.items() if value not in (None, False, "")]
    return Answer({"run": run.id, **about}, [Table(("what", "value"), rows)])


def _sweep_status(folder: Path) -> Answer:
    """Show how a sweep is, and a row for each of its jobs that has begun."""
    _, table = _sweep_at(str(folder))
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
    """Send the request named by the command to a live run, for its next step."""
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
    """End what a killed launcher has left."""
    assert run.holder is not None
    left = named(left_of(run.holder))
    grace_seconds = 0.0 if now else ORPHAN_GRACE_SECONDS
    stays = end_processes_of(run.holder.job, os.geteuid(), grace_seconds)
    if stays or is_held(run.run_dir):
        which = named(stays) if stays else "a process that cannot be seen here"
        raise NotDoneError(f"{run.id}: {which} is left of it and does not end")
    sentence = f"{run.id}: its launcher was killed; ended what was left: {left}"
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
    who = counted(len(jobs), "job")
    sentence = f"{folder}: {who} will save a checkpoint and end; no other job is started"
    data = {"sweep": str(folder), "jobs": jobs, "after": "stopping"}
    return Answer(data, [sentence])


def logs(arguments: Namespace) -> int:
    """Print the output of a job's last attempt. With ``-f``, continue until the job ends."""
    run = choose_run(arguments.which, dead_too=True, command="logs")
    is_followed = arguments.follow and run.alive
    attempt = arguments.attempt
    numbers = _attempts_in(run.run_dir)
    if attempt is not None and attempt not in numbers:
        there = ", ".join(map(str, numbers)) or "none"
        raise NotDoneError(f"{run.id}: no log of attempt {attempt}; attempts with a log: {there}")
    if not numbers and not is_followed:
        reason = None if run.state is None else run.state.reason
        raise NotDoneError(
            f"{run.id} ({run.status}) has started no attempt: {reason or run.run_dir}"
        )
    for data in output_of(run.run_dir, attempt or 0, follow=is_followed):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    return 0


def attach(arguments: Namespace) -> int:
    """Show a job's output and status until it ends. Returns its exit code, 0 after Ctrl-C.

    For a job that has ended, show its last output and how it ended.
    """
    from robust_train.report.status import LiveStatus

    run = choose_run(arguments.which, dead_too=True, command="attach")
    if run.alive:
        print(f"attached to {run.id}; Ctrl-C leaves it running", flush=True)
    live = LiveStatus(is_wanted=sys.stdout.isatty())
    try:
        with screen.never_blocking_output(), live:
            for data in output_of(run.run_dir, follow=True, last_bytes=_ATTACH_BYTES):
                screen.show(sys.stdout.fileno(), data)
                now = read_run(run.run_dir)
                if now is not None and now.alive and now.state is not None:
                    live.show(now.state)
    except KeyboardInterrupt:
        print(f"\n{run.id} keeps running; robust-train attach {run.id} shows it again")
        return 0
    return _wait_for(run.run_dir)


def wait(arguments: Namespace) -> int:
    """Wait for each job or sweep, and return the code of the first that did not complete, else
    0."""
    folders = [
        sweep_at(which) or choose_run(which, dead_too=True, command="wait").run_dir
        for which in arguments.which or [None]
    ]
    return next(filter(None, [_wait_for(folder) for folder in folders]), 0)


def _wait_for(folder: Path) -> int:
    """Wait for the job or sweep in a folder. Prints how it ended and returns its exit code."""
    if (folder / requests.SWEEP_FILE).is_file():
        while is_alive(folder, has_ended=_exit_code_in(folder) is not None):
            time.sleep(POLL_SECONDS)
        code = _exit_code_in(folder)
        print(f"{folder}: {'died' if code is None else f'ended with exit code {code}'}")
        return EXIT_FAILED if code is None else code
    while (run := read_run(folder)) is not None and run.alive:
        time.sleep(POLL_SECONDS)
    if run is None:
        raise NotDoneError(f"{folder} is gone")
    state = run.state
    reason = "" if state is None else shortened(state.reason or "", 200)
    because = f": {reason}" if reason else ""
    print(f"{run.id} {run.status}{because}; {folder}")
    code = state.exit_code if state is not None and state.is_final else None
    return EXIT_FAILED if code is None else code


def _exit_code_in(sweep_folder: Path) -> int | None:
    """Return the exit code of a sweep, or None if it has recorded none."""
    table = read_table(sweep_folder)
    return None if table is None else table.exit_code


def _attempts_in(run_dir: Path) -> list[int]:
    """Return the numbers of the attempts that have a log."""
    matches = (_NAME.fullmatch(path.name) for path in run_dir.glob(_LOG.format("*")))
    return sorted(int(match[1]) for match in matches if match)


def output_of(
    run_dir: Path, attempt: int = 0, *, follow: bool = False, last_bytes: int = 0
) -> Iterator[bytes]:
    """Yield the output of an attempt.

    For a live job, only whole lines are shown, because its log may still change the last line.

    Args:
        run_dir: the run folder.
        attempt: the attempt's number. 0 means the last attempt, and with ``follow`` those after it.
        follow: continue until the job ends.
        last_bytes: start this many bytes before the end. 0 means at the start.
    """
    number = attempt
    position = 0
    while True:
        # read before the log, so that the last output is not missed
        run = read_run(run_dir)
        is_alive = follow and run is not None and run.alive
        numbers = _attempts_in(run_dir)
        is_first = not number
        if is_first and numbers:
            number = numbers[-1]
        has_ended = number + 1 in numbers if number else False
        data = b""
        # there may be none yet, and the folder may be removed meanwhile
        path = run_dir / _LOG.format(number)
        with contextlib.suppress(OSError), path.open("rb") as file:
            if is_first and last_bytes:
                end = file.seek(0, os.SEEK_END)
                position = max(end - last_bytes, 0)
            file.seek(position)
            data = file.read(CHUNK_BYTES)
        if is_alive and not has_ended and len(data) < CHUNK_BYTES:
            data = data[: data.rfind(b"\n") + 1]
        position += len(data)
        if data:
            yield data
        elif has_ended and not attempt:
            number = number + 1
            position = 0
            yield b"\n==> attempt %d <==\n" % number
        elif has_ended or not is_alive:
            return
        else:
            yield b""
            time.sleep(POLL_SECONDS)


def _sweep_at(path: str) -> tuple[Path, SweepTable]:
    folder = Path(path).resolve()
    table = read_table(folder)
    if table is None:
        raise UsageError(f"{folder}: not a sweep folder")
    return folder, table


def limit(arguments: Namespace) -> Answer:
    """Change how many jobs of a sweep run at once."""
    folder, table = _sweep_at(arguments.path)
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
    folder, table = _sweep_at(arguments.path)
    # where they are now: it may have been moved, or still run
    rows = read_rows(folder, table.sweep)
    direction = MINIMIZE if arguments.minimize else table.direction
    table = replace(table, jobs=tuple(rows) or table.jobs, direction=direction)
    first = next(iter(best_first(table)), [])
    ranked = [row for row in first if row.value is not None]
    if not ranked:
        raise NotDoneError(f"{folder}: no job has completed with a number")
    row = max(ranked, key=lambda row: table.sign * (row.value or 0.0))
    summary = read_summary(row.path)
    checkpoint = None
    if summary is not None and summary.checkpoint is not None:
        checkpoint = str(summary.checkpoint)
    data: dict[str, Json] = {
        "job": row.job,
        "direction": direction,
        "result": row.result,
        **lacked_by_json(row.result),
        "values": values_of(ranked),
        "overrides": row.overrides,
        "folder": row.folder,
        "checkpoint": checkpoint,
    }
    # Pasted into a command, the sweep's detach=true would send that command into the background.
    words = shlex.join(select_job_overrides(row.overrides))
    shown = checkpoint if arguments.checkpoint else words
    if shown is None and not arguments.json:
        raise NotDoneError(f"{row.folder}: job {row.job} has reported no checkpoint")
    which = f"job {row.job}, which has the {table.best_is} result: {short_result(row.value)}"
    return Answer(data, [str(shown)], asides=[which])
