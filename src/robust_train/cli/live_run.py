"""Asking a live run about its memory, from a command line."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from robust_train.cli.table import print_table
from robust_train.values import MIB

EXIT_NOT_DONE = 1

_FIGURES = ("allocated", "reserved", "peak", "largest_free_block", "free")


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """The option that says which run is meant."""
    parser.add_argument(
        "--run",
        metavar="ID|PATH|PID",
        help="which run; default: the only one of yours that is alive",
    )


def request(
    command: str, which: str | None, verb: str, *, as_json: bool, alone: str, **options: Any
) -> int:
    """Have a live run carry out ``verb`` and print what came of it; returns the exit code.

    Args:
        command: what the user typed, to begin an error with.
        which: the run that was named, None for the only one.
        verb: of :func:`robust_train.memory.requests.perform`.
        as_json: for programs.
        alone: what can and cannot be done without a live run, for where there is none.
        options: of the verb.
    """
    asked, problem = ask_run(which, verb, **options)
    if asked is None:
        message = problem or f"no run of yours is alive on this machine; {alone}"
        return fail(command, message, as_json)
    run, answer = asked
    if as_json:
        print(json.dumps({"run": run.id, **answer}, indent=2))
    else:
        print_answer(run, answer)
    return 0


def ask_run(
    which: str | None, verb: str, **options: Any
) -> tuple[tuple[Any, dict[str, Any]] | None, str | None]:
    """A live run and its answer, or why there is none; neither where no run is alive.

    Args:
        which: the run that was named, None for the only one.
        verb: of :func:`robust_train.memory.requests.perform`.
        options: of the verb.
    """
    from robust_train.runfolder.client import ControlError, ask
    from robust_train.runfolder.runs import NoLiveRun, choose_run, find_live_runs

    if which is None and not find_live_runs():
        return None, None
    try:
        run = choose_run(which)
        return (run, ask(run, verb, **options)), None
    except (NoLiveRun, ControlError) as problem:
        return None, str(problem)


def print_answer(run: Any, answer: dict[str, Any], *, only_now: bool = False) -> None:
    """What came of a request, with the figures before and after in MiB, or only now's."""
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
    """Say why it was not done; returns the exit code."""
    if as_json:
        print(json.dumps({"error": message}, indent=2))
    print(f"robust-train {command}: {message}", file=sys.stderr)
    return EXIT_NOT_DONE


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:.1f}"
