"""``robust-train ps | status | logs | attach | wait | checkpoint | halve-batch | stop``: a user's
jobs, live and past."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from robust_train.cli.command import Answer, CommandFailed, Table
from robust_train.folder import live, requests, run_list
from robust_train.folder.lock import is_held, left_of
from robust_train.folder.run_list import (
    DIED,
    KnownRun,
    choose_run,
    find_live_runs,
    find_runs,
    read_run,
)
from robust_train.folder.state import read_summary
from robust_train.host import screen
from robust_train.host.linux import end_processes_of, named
from robust_train.host.signals import ORPHAN_GRACE_SECONDS
from robust_train.model.errors import EXIT_BAD_CONFIG, EXIT_FAILED
from robust_train.model.events import Json
from robust_train.readable import as_clock, duration, mib, percent, shortened
from robust_train.report.facts import GOODPUT, share_of
from robust_train.report.story import goodput_in
from robust_train.sweep.record import SWEEP_FILE, read_rows, read_table
from robust_train.sweep.table import best_first, short_result

_COLUMNS = ("id", "state", "job", "where", "step", "time", "result", "run folder")
USUALLY = 20
_WEEK_SECONDS = 7 * 86400.0
POLL_SECONDS = 0.3
CHUNK_BYTES = 1 << 20
_ATTACH_BYTES = 4096
_LOG = "attempt-{}.log"
_NAME = re.compile(r"attempt-(\d+)\.log")

_SENTENCES = {
    "checkpoint": "{run.id}: checkpoint of step {step}: {path}",
    "halve_batch": "{run.id}: micro-batch {before[micro_batch]} → {after[micro_batch]}, {how}",
}
"""What a live run has done, by request."""

About = dict[str, Json]  # State of a run, or its answer, as `--json` prints it


def list_jobs(arguments: Namespace) -> Answer:
    """List the user's jobs, live and past, the newest first."""
    if arguments.goodput:
        return _goodput(find_runs())
    if arguments.live:
        return _listed(
            find_live_runs()[::-1],
            "no run of yours is alive on this machine; robust-train ps lists earlier ones",
            all_of_them=True,
        )
    nothing = f"no run of yours is on the list in {run_list.state_directory()}"
    return _listed(
        find_runs()[::-1],
        nothing,
        all_of_them=arguments.all,
    )


def _goodput(runs: Sequence[KnownRun]) -> Answer:
    """Sum what the time of the jobs went into that ran in the last seven days."""
    since = time.time() - _WEEK_SECONDS
    recent = [run for run in runs if run.state and run.state.updated >= since]
    found = [goodput_in(run.run_dir) or {} for run in recent]
    parts = {name: sum(one.get(name, 0.0) for one in found) for name in GOODPUT}
    share, wall = share_of(parts), sum(parts.values())
    data: About = {"jobs": len(recent), "goodput": {**parts, "share": share}}
    if share is None:
        return Answer(data, ["no run of yours has taken any time in the last 7 days"])
    rows = [
        (name, duration(seconds), percent(seconds / wall))
        for name, seconds in parts.items()
        if seconds
    ]
    jobs = "1 job" if len(recent) == 1 else f"{len(recent)} jobs"
    sentence = (
        f"goodput {percent(share)}: {jobs} of the last 7 days took {duration(wall)}"
    )
    return Answer(data, [Table(("part", "time", "share"), rows), sentence])


def _listed(
    runs: Sequence[KnownRun],
    nothing: str,
    *,
    all_of_them: bool,
) -> Answer:
    """Show runs, and how those that were interrupted go on."""
    shown = runs if all_of_them else runs[:USUALLY]
    listed = []
    for run in shown:
        listed.append(run.about())
        summary = read_summary(run.run_dir) if run.status == "completed" else None
        if summary is not None:
            listed[-1]["result"] = summary.objective
    if not runs:
        return Answer({"runs": listed}, [nothing])
    rows = [_row(run, about) for run, about in zip(shown, listed, strict=True)]
    lines = Table(_COLUMNS, rows).plain_lines()
    width = shutil.get_terminal_size().columns
    if sys.stdout.isatty() and max(map(len, lines)) > width:
        narrow = Table(_COLUMNS[:-1], [row[:-1] for row in rows])
        lines = [line[:width] for line in narrow.plain_lines()]
    if len(shown) < len(runs):
        lines.append(f"older runs: {len(runs) - len(shown)}; --all shows them")
    for run in shown:
        if run.status == DIED and run.state is not None:
            how = f"to go on: robust-train resume {run.id}"
            lines.append(f"{run.id} was interrupted: {run.why_died}; {how}")
    return Answer({"runs": listed}, lines)


def _row(run: KnownRun, about: About) -> list[object]:
    reason = about.get("reason")
    result = short_result(about.get("result"))
    if reason and not run.alive and about.get("result") is None:
        result = shortened(reason, 60)
    return [
        run.id,
        "interrupted" if about["state"] == DIED else about["state"],
        about.get("name"),
        (about.get("device") or "-") + ("" if run.is_here else f" on {about['host']}"),
        _step(about),
        as_clock(int(about["seconds"])) if "seconds" in about else None,
        result,
        run.run_dir,
    ]


def _step(about: About) -> str | None:
    """Return ``12/400``, or ``12`` if the number of all steps is unknown."""
    step, total = about.get("step"), about.get("total_steps")
    if step is None or total is None:
        return None if step is None else str(step)
    return f"{step}/{total}"


def status(arguments: Namespace) -> Answer:
    """Show the state of a run, which may have ended."""
    run = choose_run(arguments.run or arguments.which, dead_too=True)
    about = live.status(run)
    facts = _facts(run, about).items()
    rows = [(name, str(value)) for name, value in facts if value is not None]
    return Answer({"run": run.id, **about}, [Table(("what", "value"), rows)])


def request(arguments: Namespace) -> Answer:
    """Have a live run do at its next step what the command is called after."""
    run = choose_run(arguments.run or arguments.which)
    verb = arguments.command.replace("-", "_")
    answer = live.ask(
        run,
        verb,
        wait_seconds=arguments.wait,
    )
    sentence = _SENTENCES[verb].format(run=run, **answer)
    return Answer({"run": run.id, **answer}, [sentence])


def stop(arguments: Namespace) -> Answer:
    """Have a live run, or a sweep with its jobs, save checkpoints and end."""
    which = arguments.run or arguments.which
    if which and os.path.isfile(Path(which) / SWEEP_FILE):
        return _stop_sweep(Path(which).resolve())
    run = choose_run(which)
    if run.is_orphaned:
        return _stop_orphaned(run, now=arguments.now)
    answer = live.ask(run, "stop", now=arguments.now)
    sentence = (
        f"{run.id} (pid {run.pid}, {answer['before']}) stops and will exit with 143"
    )
    return Answer({"run": run.id, **answer}, [sentence])


def _stop_orphaned(run: KnownRun, *, now: bool) -> Answer:
    """End what a killed launcher has left."""
    assert run.holder is not None
    left = named(left_of(run.holder))
    grace_seconds = 0.0 if now else ORPHAN_GRACE_SECONDS
    stays = end_processes_of(
        run.holder.job,
        os.geteuid(),
        grace_seconds,
    )
    if stays or is_held(run.run_dir):
        which = "a process that cannot be seen here holds its folder"
        if stays:
            which = f"{named(stays)} hangs in the kernel"
        raise CommandFailed(f"{run.id}: its launcher was killed, but {which}")
    sentence = f"{run.id}: its launcher was killed; ended what was left: {left}"
    data = {"run": run.id, "before": run.status, "after": DIED}
    return Answer(data, [sentence])


def _stop_sweep(folder: Path) -> Answer:
    jobs = [run.id for run in find_live_runs() if folder in run.run_dir.parents]
    try:
        if not jobs and is_held(folder) is False:
            raise requests.Refused("this sweep has ended")
        requests.request_sweep_stop(folder)
    except (OSError, requests.Refused) as error:
        raise CommandFailed(f"{folder}: {error}") from error
    sentence = (
        f"{folder}: {len(jobs)} jobs save a checkpoint and end; no other job is started"
    )
    data = {"sweep": str(folder), "jobs": jobs, "after": "stopping"}
    return Answer(data, [sentence])


def _facts(run: KnownRun, about: About) -> dict[str, Json]:
    """Return what ``status`` shows, None if unknown."""
    waiting, memory = about.get("waiting") or {}, about.get("memory") or {}
    state, loss, reason = about["state"], about.get("loss"), about.get("reason")
    seconds = as_clock(int(about.get("seconds_in_state", 0)))
    since = f"{state} for {seconds}" if run.alive else state
    if "last_state" in about:
        since = f"{state}; the last state was {about['last_state']}, {seconds} long"
    used = ", ".join(f"{name} {mib(size)}" for name, size in memory.items())
    return {
        "run": about["id"],
        "job": about.get("name"),
        "state": since,
        "why": waiting.get("reason") or (None if state == "running" else reason),
        "position": waiting.get("position"),
        "exit code": about.get("exit_code"),
        "run folder": about["run_dir"],
        "host": None if run.is_here else about.get("host"),
        "launcher pid": about["pid"],
        "attempt": about.get("attempt"),
        "attempt pid": about.get("attempt_pid"),
        "device": about.get("device"),
        "batch": _batch(about),
        "effective batch": about.get("effective_batch_size"),
        "step": _step(about),
        "loss": None if loss is None else f"{loss:.4g}",
        "slow": (about.get("slow") or None) if run.alive else None,
        "last checkpoint": about.get("checkpoint"),
        "memory": used or None,
        "started": f"{as_clock(int(about['seconds']))} ago" if run.alive else None,
        "to go on": f"robust-train resume {run.id}" if run.is_unfinished else None,
    }


def _batch(about: About) -> str | None:
    """Return ``64 × 2``, and into what recovery has split it."""
    size, split = about.get("batch_size"), about.get("micro_batch")
    if size is None:
        return None
    inside = "" if split in (None, size) else f", split into {split}"
    return f"{size} × {about['gradient_accumulation_steps']}{inside}"


def logs(arguments: Namespace) -> int:
    """Print the output of a job's last attempt; with ``-f`` continue until the job ends."""
    run = _any_run(arguments.which)
    follows, attempt = arguments.follow and run.alive, arguments.attempt
    numbers = _attempts_in(run.run_dir)
    if attempt is not None and attempt not in numbers:
        there = ", ".join(map(str, numbers)) or "none"
        raise CommandFailed(f"{run.id}: no log of attempt {attempt}; there are {there}")
    if not numbers and not follows:
        reason = (run.state and run.state.reason) or run.run_dir
        raise CommandFailed(f"{run.id} ({run.status}) has started no attempt: {reason}")
    for data in output_of(
        run.run_dir,
        attempt,
        follow=follows,
    ):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    return 0


def attach(arguments: Namespace) -> int:
    """Show a job's output and status until it ends; return its exit code, 0 after Ctrl-C."""
    from robust_train.report.status import LiveStatus

    run = choose_run(arguments.which)
    name = "" if run.state is None else f" ({run.state.name})"
    print(f"attached to {run.id}{name}; Ctrl-C leaves it running", flush=True)
    live = LiveStatus(is_wanted=sys.stdout.isatty())
    try:
        with screen.never_blocking_output(), live:
            for data in output_of(
                run.run_dir,
                follow=True,
                last_bytes=_ATTACH_BYTES,
            ):
                screen.show(sys.stdout.fileno(), data)
                now = read_run(run.run_dir)
                if now is not None and now.alive and now.state is not None:
                    live.show(now.state)
    except KeyboardInterrupt:
        print(f"\n{run.id} keeps running; robust-train attach {run.id} shows it again")
        return 0
    return _wait_for(run.run_dir)


def wait(arguments: Namespace) -> int:
    """Wait for each job or sweep; return the code of the first that did not complete, else 0."""
    folders = [_any_run(which).run_dir for which in arguments.which or [None]]
    codes = [_wait_for(folder) for folder in folders]
    return next((code for code in codes if code), 0)


def _wait_for(folder: Path) -> int:
    """Wait for the job or sweep in a folder; print how it ended and return its exit code."""
    if (folder / SWEEP_FILE).is_file():
        while is_held(folder):
            time.sleep(POLL_SECONDS)
        table = read_table(folder)
        code = None if table is None else table.exit_code
        print(f"{folder}: {'died' if code is None else f'ended with exit code {code}'}")
        return EXIT_FAILED if code is None else code
    while (run := read_run(folder)) is not None and run.alive:
        time.sleep(POLL_SECONDS)
    if run is None:
        raise CommandFailed(f"{folder} is gone")
    state = run.state
    reason = "" if state is None else shortened(state.reason or "", 200)
    print(f"{run.id} {run.status}{reason and f': {reason}'}; {folder}")
    code = state.exit_code if state is not None and state.is_final else None
    return EXIT_FAILED if code is None else code


def _any_run(which: str | None) -> KnownRun:
    """Return the run that is meant, live or past; by default the live one, else the newest.

    Raises NoLiveRun if there is none, or more than one.
    """
    try:
        return choose_run(which, dead_too=True)
    except run_list.NothingAlive:
        known = find_runs()
        if not known:
            raise
        return known[-1]


def _attempts_in(run_dir: Path) -> list[int]:
    """Return the numbers of the attempts that have a log."""
    found = (_NAME.fullmatch(path.name) for path in run_dir.glob(_LOG.format("*")))
    return sorted(int(match[1]) for match in found if match)


def output_of(
    run_dir: Path,
    attempt: int | None = None,
    *,
    follow: bool = False,
    last_bytes: int | None = None,
) -> Iterator[bytes]:
    """Yield what an attempt has printed.

    Of a job that is alive only whole lines are shown: its log may still take back the last one.

    Args:
        run_dir: the run folder.
        attempt: the attempt's number; the last one if None, and with ``follow`` those after it.
        follow: continue until the job ends.
        last_bytes: begin at most this many bytes before the end.
    """
    number, position, ends_line = attempt, 0, True
    while True:
        # read before the log, so that the last output is not missed
        run = read_run(run_dir)
        is_alive = follow and run is not None and run.alive
        numbers = _attempts_in(run_dir)
        if number is None and numbers:
            number = numbers[-1]
            if last_bytes is not None:
                position = _line_start(run_dir, number, last_bytes)
        has_ended = number is not None and number + 1 in numbers
        data = b"" if number is None else _read(run_dir, number, position)
        if is_alive and not has_ended and len(data) < CHUNK_BYTES:
            data = data[: data.rfind(b"\n") + 1]
        position += len(data)
        if data:
            yield data
            ends_line = data.endswith(b"\n")
        elif number is not None and has_ended and attempt is None:
            number, position = number + 1, 0
            yield b"%s==> attempt %d <==\n" % (b"" if ends_line else b"\n", number)
        elif has_ended or not is_alive:
            return
        else:
            yield b""
            time.sleep(POLL_SECONDS)


def _line_start(
    run_dir: Path,
    number: int,
    last_bytes: int,
) -> int:
    """Return where the first whole line of the last bytes of a log begins."""
    try:
        size = (run_dir / _LOG.format(number)).stat().st_size
    except OSError:
        return 0
    start = max(size - last_bytes, 0)
    return start and start + _read(run_dir, number, start).find(b"\n") + 1


def _read(
    run_dir: Path,
    number: int,
    position: int,
) -> bytes:
    try:
        with (run_dir / _LOG.format(number)).open("rb") as file:
            file.seek(position)
            return file.read(CHUNK_BYTES)
    except OSError:
        return b""


def max_jobs(arguments: Namespace) -> Answer:
    """Change how many jobs of a sweep run at once."""
    folder, number = Path(arguments.path).resolve(), arguments.number
    if read_table(folder) is None:
        raise CommandFailed(f"{folder}: not a sweep folder", EXIT_BAD_CONFIG)
    try:
        requests.request_max_jobs(folder, number)
    except OSError as error:
        raise CommandFailed(f"{folder}: {error}") from error
    data: dict[str, Json] = {"sweep": str(folder), "max_jobs": number}
    return Answer(data, [f"{folder}: at most {number} jobs at once from now on"])


def best(arguments: Namespace) -> Answer:
    """Return the best job of a sweep: its overrides, or where its checkpoint is."""
    folder = Path(arguments.path).resolve()
    table = read_table(folder)
    if table is None:
        raise CommandFailed(f"{folder}: not a sweep folder", EXIT_BAD_CONFIG)
    if not table.jobs:  # it runs
        table = replace(table, jobs=tuple(read_rows(folder, table.sweep)))
    point = next((one for one in best_first(table) if one.values), None)
    if point is None:
        raise CommandFailed(f"{folder}: no job has completed with a number")
    row = point.best(table.sign)
    summary = None if row.folder is None else read_summary(Path(row.folder))
    checkpoint = None if summary is None else summary.checkpoint
    data: dict[str, Json] = {
        "job": row.job,
        "result": row.result,
        "values": point.values,
        "overrides": row.overrides,
        "folder": row.folder,
        "checkpoint": None if checkpoint is None else str(checkpoint),
    }
    if not arguments.checkpoint or arguments.json:
        return Answer(data, [shlex.join(row.overrides)])
    if checkpoint is None:
        raise CommandFailed(f"{row.folder}: job {row.job} has reported no checkpoint")
    return Answer(data, [str(checkpoint)])
