"""``robust-train run``: see the caller's live runs, and steer one while it trains."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from robust_train.cli.parser import Parser
from robust_train.cli.table import print_table
from robust_train.control.client import (
    ControlError,
    LiveRun,
    NoLiveRun,
    ask,
    choose_run,
    find_live_runs,
)
from robust_train.control.protocol import USUAL_WAIT_SECONDS
from robust_train.readable import as_clock
from robust_train.values import MIB

COLUMNS = ("id", "state", "job", "pid", "attempt", "device", "batch", "step", "for", "run folder")
_RIGHT = {"pid", "attempt", "step", "for"}
EXIT_NOT_DONE = 1

_VERBS = {
    "list": "your live runs on this machine",
    "status": "how a run stands: state, device, batch, step, loss, last checkpoint, memory",
    "checkpoint": "save a checkpoint at the next step and train on",
    "halve-batch": "go on with half the micro-batch at the same effective batch size",
    "stop": "save a checkpoint and end, as SIGTERM would",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Carry the command out; returns the exit code.

    0: done. 1: there is no such run, or it does not do it, or not yet; one line says which.
    """
    parser = Parser(prog="robust-train run", description="Talk to a run that is alive.")
    commands = parser.add_subparsers(dest="command", required=True)
    for verb, meaning in _VERBS.items():
        command = commands.add_parser(verb, help=meaning, description=meaning)
        command.add_argument("--json", action="store_true", help="for programs; sizes in bytes")
        if verb == "list":
            continue
        command.add_argument("which", nargs="?", metavar="RUN", help="the same as --run")
        command.add_argument(
            "--run", metavar="ID|PATH|PID", help="which run; needed where you have several"
        )
        if verb == "stop":
            command.add_argument(
                "--now", action="store_true", help="end a run that is stopping already"
            )
        if verb in ("checkpoint", "halve-batch"):
            command.add_argument(
                "--wait",
                type=float,
                default=USUAL_WAIT_SECONDS,
                metavar="SECONDS",
                help="for a step to end (default: %(default)g)",
            )
    arguments = parser.parse_args(argv)
    if arguments.command == "list":
        return _list(arguments.json)
    try:
        run = choose_run(arguments.run or arguments.which)
        answer = _ask(run, arguments)
    except (NoLiveRun, ControlError) as problem:
        if arguments.json:
            print(json.dumps({"error": str(problem)}, indent=2))
        print(f"robust-train run {arguments.command}: {problem}", file=sys.stderr)
        return EXIT_NOT_DONE
    if arguments.json:
        print(json.dumps({"run": run.id, **answer}, indent=2))
    else:
        _SHOW[arguments.command](run, answer)
    return 0


def _ask(run: LiveRun, arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.command == "stop":
        return ask(run, "stop", now=arguments.now)
    if arguments.command == "status":
        return ask(run, "status")
    return ask(run, arguments.command.replace("-", "_"), wait_seconds=arguments.wait)


def _list(as_json: bool) -> int:
    runs = find_live_runs()
    if as_json:
        listed = [{"id": r.id, "pid": r.pid, "state": r.state, **r.about} for r in runs]
        print(json.dumps({"runs": listed}, indent=2))
    elif runs:
        print_table(COLUMNS, [_row(run) for run in runs], _RIGHT)
    else:
        print("no run of yours is alive on this machine")
    return 0


def _row(run: LiveRun) -> list[str]:
    about = run.about
    return [
        run.id,
        run.state,
        str(about.get("name", "-")),
        str(run.pid),
        str(about.get("attempt", "-")),
        str(about.get("device", "-")),
        _batch(about) or "-",
        _step(about) or "-",
        as_clock(int(about["seconds_in_state"])) if about else "-",
        str(run.run_dir) if about else "-",
    ]


def _show_status(run: LiveRun, about: Mapping[str, Any]) -> None:
    waiting = about["waiting"] or {}
    reason = about.get("reason") if about["state"] == "between attempts" else None
    memory = about.get("memory") or {}
    rows = (
        ("run", about["id"]),
        ("job", about["name"]),
        ("state", f"{about['state']} for {as_clock(int(about['seconds_in_state']))}"),
        ("why", waiting.get("reason") or reason),
        ("position", waiting.get("position")),
        ("run folder", about["run_dir"]),
        ("launcher pid", about["pid"]),
        ("attempt", about.get("attempt")),
        ("attempt pid", about.get("attempt_pid")),
        ("device", about.get("device")),
        ("batch", _batch(about)),
        ("effective batch", about.get("effective_batch_size")),
        ("step", _step(about)),
        ("loss", None if about.get("loss") is None else f"{about['loss']:.4g}"),
        ("last checkpoint", about.get("checkpoint")),
        ("memory", ", ".join(f"{k} {v // MIB} MiB" for k, v in memory.items()) or None),
        ("started", f"{as_clock(int(about['seconds']))} ago"),
    )
    known = [[name, str(value)] for name, value in rows if value is not None]
    print_table(("what", "value"), known)


def _show_checkpoint(run: LiveRun, answer: Mapping[str, Any]) -> None:
    print(f"{run.id}: checkpoint of step {answer['step']}: {answer['path']}")


def _show_halved(run: LiveRun, answer: Mapping[str, Any]) -> None:
    before, after = answer["before"]["micro_batch"], answer["after"]["micro_batch"]
    print(f"{run.id}: micro-batch {before} → {after}, {answer['how']}")


def _show_stop(run: LiveRun, answer: Mapping[str, Any]) -> None:
    print(f"{run.id} (pid {run.pid}, {answer['before']}) was asked to stop; it will exit with 143")


_SHOW: dict[str, Callable[[LiveRun, Mapping[str, Any]], None]] = {
    "status": _show_status,
    "checkpoint": _show_checkpoint,
    "halve-batch": _show_halved,
    "stop": _show_stop,
}


def _batch(about: Mapping[str, Any]) -> str | None:
    """``64 × 2``, with what it is split into since."""
    size = about.get("batch_size")
    if size is None:
        return None
    split = about.get("micro_batch")
    inside = "" if split is None or split == size else f", split into {split}"
    return f"{size} × {about['gradient_accumulation_steps']}{inside}"


def _step(about: Mapping[str, Any]) -> str | None:
    step, total = about.get("step"), about.get("total_steps")
    if step is None:
        return None
    return str(step) if total is None else f"{step}/{total}"
