"""``robust-train run VERB``: show the state of a live run, and steer it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from robust_train.cli import runs
from robust_train.cli.output import Parser, fail, print_json, print_table
from robust_train.events import Json
from robust_train.readable import as_clock, mib
from robust_train.runfolder import requests
from robust_train.runfolder.lock import is_held
from robust_train.runfolder.run_list import NoLiveRun, Run, choose_run, find_live_runs

_VERBS = {
    "list": "your live runs",
    "status": "state of a live run, or the last state of one that ended: device, batch, step, "
    "loss, last checkpoint, memory",
    "checkpoint": "save a checkpoint at the next step and train on",
    "halve-batch": "go on with half the micro-batch at the same effective batch size",
    "stop": "save a checkpoint and end, as SIGTERM would; RUN may be a sweep's folder",
}

About = dict[str, Json]  # State of a run, or its answer, as `--json` prints it


def main(argv: Sequence[str] | None = None) -> int:
    """Carry the command out; return the exit code. 0: done (``status`` also for a run that has
    ended or died). 1: there is no such run, or it does not do it, or not yet."""
    arguments = _parser().parse_args(argv)
    verb = arguments.command
    if verb == "list":
        return runs.show(find_live_runs()[::-1], arguments.json)
    which = arguments.run or arguments.which
    try:
        if verb == "stop" and which and os.path.isfile(Path(which) / "sweep.json"):
            return _stop_sweep(Path(which).resolve(), arguments.json)
        run = choose_run(which, dead_too=verb == "status")
        answer = _ask(run, arguments)
    except (NoLiveRun, requests.ControlError) as problem:
        return fail(f"run {verb}", str(problem), arguments.json)
    if arguments.json:
        print_json({"run": run.id, **answer})
    elif verb == "status":
        _show_status(run, answer)
    else:
        print(_sentence(verb, run, answer))
    return 0


def _parser() -> Parser:
    parser = Parser(prog="robust-train run", description="List and steer runs.")
    commands = parser.add_subparsers(dest="command", required=True)
    for verb, meaning in _VERBS.items():
        command: Parser = commands.add_parser(verb, help=meaning, description=meaning)
        command.add_json()
        if verb == "list":
            continue
        command.add_argument("which", nargs="?", metavar="RUN", help="the same as --run")
        command.add_run()
        if verb == "stop":
            now = "end a run that is stopping already"
            command.add_argument("--now", action="store_true", help=now)
        if verb in ("checkpoint", "halve-batch"):
            wait, usual = "for a step to end (default: %(default)g)", requests.USUAL_WAIT_SECONDS
            command.add_argument("--wait", type=float, default=usual, metavar="SECONDS", help=wait)
    return parser


def _ask(run: Run, arguments: argparse.Namespace) -> About:
    if arguments.command == "stop":
        return requests.ask(run, "stop", now=arguments.now)
    if arguments.command == "status":
        return requests.status(run)
    return requests.ask(run, arguments.command.replace("-", "_"), wait_seconds=arguments.wait)


def _stop_sweep(folder: Path, as_json: bool) -> int:
    jobs = [run.id for run in find_live_runs() if folder in run.run_dir.parents]
    try:
        if not jobs and is_held(folder) is False:
            raise requests.Refused("this sweep has ended")
        requests.request_sweep_stop(folder)
    except (OSError, requests.Refused) as error:
        return fail("run stop", f"{folder}: {error}", as_json)
    if as_json:
        print_json({"sweep": str(folder), "jobs": jobs, "after": "stopping"})
    else:
        print(f"{folder}: {len(jobs)} jobs save a checkpoint and end; no other one is started")
    return 0


def _show_status(run: Run, about: About) -> None:
    waiting = about.get("waiting") or {}
    state, loss, memory = about["state"], about.get("loss"), about.get("memory") or {}
    seconds = as_clock(int(about.get("seconds_in_state", 0)))
    since = f"{state} for {seconds}" if run.alive else state
    if "last_state" in about:
        since = f"{state}; the last state was {about['last_state']}, {seconds} long"
    rows = (
        ("run", about["id"]),
        ("job", about.get("name")),
        ("state", since),
        ("why", waiting.get("reason") or (None if state == "running" else about.get("reason"))),
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
        ("step", runs.step_of(about)),
        ("loss", None if loss is None else f"{loss:.4g}"),
        ("last checkpoint", about.get("checkpoint")),
        ("memory", ", ".join(f"{k} {mib(v)}" for k, v in memory.items()) or None),
        ("started", f"{as_clock(int(about['seconds']))} ago" if run.alive else None),
    )
    known = [[name, str(value)] for name, value in rows if value is not None]
    print_table(("what", "value"), known)


def _sentence(verb: str, run: Run, answer: About) -> str:
    if verb == "checkpoint":
        return f"{run.id}: checkpoint of step {answer['step']}: {answer['path']}"
    if verb == "halve-batch":
        before, after = answer["before"]["micro_batch"], answer["after"]["micro_batch"]
        return f"{run.id}: micro-batch {before} → {after}, {answer['how']}"
    return f"{run.id} (pid {run.pid}, {answer['before']}) stops and will exit with 143"


def _batch(about: About) -> str | None:
    """Return ``64 × 2``, with what it is split into since."""
    size, split = about.get("batch_size"), about.get("micro_batch")
    if size is None:
        return None
    inside = "" if split is None or split == size else f", split into {split}"
    return f"{size} × {about['gradient_accumulation_steps']}{inside}"
