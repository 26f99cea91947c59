"""``robust-train memory kill``: end CUDA processes of one's own."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from typing import NamedTuple

import psutil

from robust_train.cli.output import EXIT_NOT_DONE, Parser, fail, print_json, print_table
from robust_train.errors import EXIT_BAD_CONFIG
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.processes import (
    CudaProcess,
    CudaProcesses,
    is_there,
    list_cuda_processes,
    send_signal,
)
from robust_train.values import MIB

COLUMNS = ("pid", "user", "command", "GPUs", "MiB")
EXIT_INTERRUPTED = 130
_LAST_SECONDS = 10.0
_POLL_SECONDS = 0.05
_SENTENCES = {
    "ended": "has ended",
    "killed": "had not ended {grace:g} s after SIGTERM and was killed",
    "gone": "was gone already",
    "not permitted": "may not be signalled by this user",
    "still there": "is still there after SIGKILL: it waits in the kernel or the driver",
}


class Choice(NamedTuple):
    """Whom to end, and for each number that was named and must not be ended the reason."""

    targets: tuple[CudaProcess, ...]
    refusals: dict[int, str]


class Ending(NamedTuple):
    """How it went with a process: ``ended`` (after SIGTERM), ``killed`` (SIGKILL), ``gone`` (before
    anything was sent), ``not permitted``, or ``still there``."""

    process: CudaProcess
    how: str


def add_arguments(parser: Parser) -> None:
    """Add the options of ``kill``, beside ``--json``."""
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")
    parser.add_argument("--dry-run", action="store_true", help="show who would be ended; end none")
    only = "only this process (may be repeated); root may name others' processes"
    parser.add_argument("--pid", type=int, action="append", default=[], metavar="PID", help=only)
    grace = "from SIGTERM to SIGKILL (default 10)"
    parser.add_argument("--grace", type=_seconds, default=10.0, metavar="SECONDS", help=grace)


def run(arguments: argparse.Namespace) -> int:
    """Show, ask, end; return the exit code.

    0: all that were chosen are gone, or there was none, or ``--dry-run``. 1: somebody is still
    there, was refused, or the answer was no. 2: nobody could be asked. 130: Ctrl-C at the question.
    """
    inventory = read_inventory()
    if inventory.problem is not None:
        problem = f"CUDA processes cannot be listed: {inventory.problem}"
        return fail("memory kill", problem, arguments.json)
    me = psutil.Process()
    ancestors = {process.pid for process in (me, *me.parents())}
    listed = list_cuda_processes(inventory)
    targets, refusals = choose(listed, arguments.pid, uid=os.getuid(), ancestors=ancestors)
    if refusals:
        if arguments.json:
            refused = [{"pid": pid, "reason": why} for pid, why in refusals.items()]
            print_json({"error": "refused", "refused": refused})
        for pid, why in refusals.items():
            fail("memory kill", f"pid {pid} {why}; nothing was ended")
        return EXIT_NOT_DONE
    try:
        return _show_and_end(targets, arguments)
    except KeyboardInterrupt:
        print("\nnothing further was sent", file=sys.stderr)
        return EXIT_INTERRUPTED


def choose(
    listed: CudaProcesses, named: Sequence[int], *, uid: int, ancestors: Collection[int]
) -> Choice:
    """Decide which of the listed processes to end.

    Args:
        listed: what NVML lists.
        named: process ids that were asked for; none: all of the caller's own.
        uid: the caller's user; only 0 may name others' processes.
        ancestors: the caller itself and all that it was started by.
    """
    if not named:
        own = [p for p in listed.processes if p.uid == uid and p.pid not in ancestors]
        return Choice(tuple(own), {})
    by_pid = {process.pid: process for process in listed.processes}
    targets: list[CudaProcess] = []
    refusals: dict[int, str] = {}
    for pid in dict.fromkeys(named):
        process = by_pid.get(pid)
        if pid in ancestors:
            refusals[pid] = "is this command itself, or what it was started from"
        elif process is None:
            refusals[pid] = listed.others.get(pid, "is no CUDA process: NVML does not list it")
        elif process.uid != uid and uid != 0:
            refusals[pid] = f"belongs to {process.user}"
        else:
            targets.append(process)
    return Choice(tuple(targets), refusals)


def end_all(
    processes: Sequence[CudaProcess], *, grace_seconds: float, last_seconds: float
) -> list[Ending]:
    """Send SIGTERM to all, and SIGKILL to those that are still there when the grace is over; then
    wait ``last_seconds``, for a process in the driver may need a while. Never signals a process
    that has only inherited the number, however long ago it was listed."""
    how = {process: _send(process, signal.SIGTERM, "ended") for process in processes}
    asked = [process for process in processes if how[process] == "ended"]
    stubborn = _still_there(asked, grace_seconds)
    how |= {process: _send(process, signal.SIGKILL, "killed") for process in stubborn}
    # one that ended just before SIGKILL did so by itself
    how |= {process: "ended" for process in stubborn if how[process] == "gone"}
    killed = [process for process in stubborn if how[process] == "killed"]
    how |= dict.fromkeys(_still_there(killed, last_seconds), "still there")
    return [Ending(process, how[process]) for process in processes]


def _send(process: CudaProcess, signum: signal.Signals, sent: str) -> str:
    try:
        return sent if send_signal(process.pid, process.started, signum) else "gone"
    except PermissionError:
        return "not permitted"


def _still_there(processes: Iterable[CudaProcess], seconds: float) -> list[CudaProcess]:
    """Wait for the processes to end; return those that have not."""
    deadline = time.monotonic() + seconds
    while True:
        left = [process for process in processes if is_there(process.pid, process.started)]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(_POLL_SECONDS)


def _show_and_end(targets: Sequence[CudaProcess], arguments: argparse.Namespace) -> int:
    if not arguments.json and not targets:
        print("no CUDA process of yours runs on this machine's GPUs")
    elif not arguments.json:
        print_table(COLUMNS, [_row(process) for process in targets], {"pid", "MiB"})
    number = "this process" if len(targets) == 1 else f"these {len(targets)} processes"
    if targets and not arguments.dry_run and not arguments.yes:
        if arguments.json or not sys.stdin.isatty():
            problem = "nobody to ask here: add --yes to end them, or --dry-run to look"
            return fail("memory kill", problem, arguments.json, EXIT_BAD_CONFIG)
        if not _confirmed(f"end {number}? [y/N] "):
            print("nothing was ended")
            return EXIT_NOT_DONE
    endings: list[Ending] = []
    if targets and arguments.dry_run and not arguments.json:
        print(f"would end {number}; nothing was sent (--dry-run)")
    elif not arguments.dry_run:
        endings = end_all(targets, grace_seconds=arguments.grace, last_seconds=_LAST_SECONDS)
    if arguments.json:
        how = {ending.process.pid: ending.how for ending in endings}
        processes = [{**asdict(process), "result": how.get(process.pid)} for process in targets]
        print_json({"dry_run": arguments.dry_run, "processes": processes})
    else:
        for process, ended in endings:
            sentence = _SENTENCES[ended].format(grace=arguments.grace)
            print(f"{process.command} (pid {process.pid}) {sentence}")
    left = any(ending.how in ("not permitted", "still there") for ending in endings)
    return EXIT_NOT_DONE if left else 0


def _confirmed(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


def _row(process: CudaProcess) -> list[str]:
    gpus = ", ".join(map(str, process.gpus))
    size = "?" if process.used_bytes is None else str(process.used_bytes // MIB)
    return [str(process.pid), process.user, process.command, gpus, size]


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: accepted is a number of seconds, 0 or more")
    return value
