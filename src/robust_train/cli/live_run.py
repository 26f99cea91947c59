"""Requests to a live run about its memory, from a command line."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from robust_train.cli.table import print_table
from robust_train.runfolder.client import ControlError, ask
from robust_train.runfolder.runs import NoLiveRun, Run, choose_run, find_live_runs
from robust_train.values import MIB

EXIT_NOT_DONE = 1

_FIGURES = ("allocated", "reserved", "peak", "largest_free_block", "free")


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that names a run."""
    parser.add_argument(
        "--run",
        metavar="ID|PATH|PID",
        help="which run; default: the only one of yours that is alive",
    )


def request(
    command: str, which: str | None, verb: str, *, as_json: bool, alone: str, **options: Any
) -> int:
    """Have a live run carry out ``verb`` and print the answer; return the exit code.

    Args:
        command: what an error begins with.
        which: the run's name, None for the only one.
        verb: of :func:`robust_train.memory.requests.perform`.
        as_json: print for programs.
        alone: what to do without a live run, said where there is none.
        options: of the verb.
    """
    try:
        found = ask_run(which, verb, **options)
    except (NoLiveRun, ControlError) as problem:
        return fail(command, str(problem), as_json)
    if found is None:
        return fail(command, f"no run of yours is alive on this machine; {alone}", as_json)
    run, answer = found
    if as_json:
        print(json.dumps({"run": run.id, **answer}, indent=2))
    else:
        print_answer(run, answer)
    return 0


def ask_run(which: str | None, verb: str, **options: Any) -> tuple[Run, dict[str, Any]] | None:
    """Return a live run and its answer; None where none was named and none is alive.

    Raises:
        NoLiveRun: no run is meant, or several.
        ControlError: the run does not do it.
    """
    if which is None and not find_live_runs():
        return None
    run = choose_run(which)
    return run, ask(run, verb, **options)


def print_answer(run: Run, answer: dict[str, Any], *, only_now: bool = False) -> None:
    """Print an answer with the figures before and after in MiB, or only now's."""
    print(f"run {run.id} (pid {run.pid}, {run.run_dir}): {answer['sentence']}")
    before, after = answer["before"], answer["after"]
    rows = [
        [name.replace("_", " "), _mib(before[name]), _mib(after[name])]
        for name in _FIGURES
        if after.get(name) is not None
    ]
    if only_now:
        print_table(("MiB", "now"), [[name, now] for name, _, now in rows], {"now"})
    else:
        print_table(("MiB", "before", "after"), rows, {"before", "after"})


def fail(command: str, message: str, as_json: bool) -> int:
    """Print why it was not done; return the exit code."""
    if as_json:
        print(json.dumps({"error": message}, indent=2))
    print(f"robust-train {command}: {message}", file=sys.stderr)
    return EXIT_NOT_DONE


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:.1f}"
