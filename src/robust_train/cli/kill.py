"""``robust-train memory kill``: end CUDA processes of one's own."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from robust_train.cli.table import print_table
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
_RIGHT = {"pid", "MiB"}
EXIT_NOT_DONE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_COMMAND = "robust-train memory kill"
_LAST_SECONDS = 10.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Choice:
    """Whom to end, and for each number that was named and must not be ended the reason."""

    targets: tuple[CudaProcess, ...]
    refusals: dict[int, str]


@dataclass(frozen=True)
class Ending:
    """How it went with a process.

    Attributes:
        process: which.
        how: ``ended`` (after SIGTERM), ``killed`` (SIGKILL), ``gone`` (before anything was sent),
            ``not permitted``, or ``still there``.
    """

    process: CudaProcess
    how: str

    @property
    def is_gone(self) -> bool:
        """Whether the process is no more."""
        return self.how in ("ended", "killed", "gone")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kill``, beside ``--json``."""
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")
    parser.add_argument("--dry-run", action="store_true", help="show who would be ended; end none")
    parser.add_argument(
        "--pid",
        type=int,
        action="append",
        default=[],
        metavar="PID",
        help="only this process (may be repeated); root may name others' processes",
    )
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="from SIGTERM to SIGKILL (default 10)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Show, ask, end; returns the exit code.

    0: all that were chosen are gone, or there was none, or ``--dry-run``. 1: somebody is still
    there, was refused, or the answer was no. 2: nobody could be asked. 130: Ctrl-C at the question.
    """
    inventory = read_inventory()
    if inventory.problem is not None:
        return _fail(f"CUDA processes cannot be listed: {inventory.problem}", arguments.json)
    listed = list_cuda_processes(inventory)
    me = psutil.Process()
    ancestors = {process.pid for process in (me, *me.parents())}
    choice = choose(listed, arguments.pid, uid=os.getuid(), ancestors=ancestors)
    if choice.refusals:
        return _refuse(choice, arguments.json)
    try:
        return _end(choice.targets, arguments)
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
    """Send SIGTERM to all, and SIGKILL to those that are still there when the grace is over.

    Never signals a process that has only inherited the number, however long ago it was listed.

    Args:
        processes: whom.
        grace_seconds: time to end by themselves.
        last_seconds: how long to wait after SIGKILL; a process in the driver may need a while.
    """
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


def _end(targets: Sequence[CudaProcess], arguments: argparse.Namespace) -> int:
    if not targets:
        if arguments.json:
            _print_json([], [], dry_run=arguments.dry_run)
        else:
            print("no CUDA process of yours runs on this machine's GPUs")
        return 0
    if not arguments.json:
        print_table(COLUMNS, [_row(process) for process in targets], _RIGHT)
    if arguments.dry_run:
        if arguments.json:
            _print_json(targets, [], dry_run=True)
        else:
            print(f"would end {_number(len(targets))}; nothing was sent (--dry-run)")
        return 0
    if not arguments.yes:
        if arguments.json or not sys.stdin.isatty():
            message = "nobody to ask here: add --yes to end them, or --dry-run to look"
            return _fail(message, arguments.json, EXIT_USAGE)
        if not _confirmed(len(targets)):
            print("nothing was ended")
            return EXIT_NOT_DONE
    endings = end_all(targets, grace_seconds=arguments.grace, last_seconds=_LAST_SECONDS)
    if arguments.json:
        _print_json(targets, endings, dry_run=False)
    else:
        for ending in endings:
            print(_sentence(ending, arguments.grace))
    return 0 if all(ending.is_gone for ending in endings) else EXIT_NOT_DONE


def _confirmed(number: int) -> bool:
    try:
        answer = input(f"end {_number(number)}? [y/N] ")
    except EOFError:
        print()
        return False
    return answer.strip().lower() in ("y", "yes")


def _refuse(choice: Choice, as_json: bool) -> int:
    if as_json:
        refused = [{"pid": pid, "reason": why} for pid, why in choice.refusals.items()]
        print(json.dumps({"error": "refused", "refused": refused}, indent=2))
    for pid, why in choice.refusals.items():
        print(f"{_COMMAND}: pid {pid} {why}; nothing was ended", file=sys.stderr)
    return EXIT_NOT_DONE


def _fail(message: str, as_json: bool, code: int = EXIT_NOT_DONE) -> int:
    if as_json:
        print(json.dumps({"error": message}, indent=2))
    print(f"{_COMMAND}: {message}", file=sys.stderr)
    return code


def _sentence(ending: Ending, grace: float) -> str:
    who = f"{ending.process.command} (pid {ending.process.pid})"
    return {
        "ended": f"{who} has ended",
        "killed": f"{who} had not ended {grace:g} s after SIGTERM and was killed",
        "gone": f"{who} was gone already",
        "not permitted": f"{who} may not be signalled by this user",
        "still there": f"{who} is still there after SIGKILL: it waits in the kernel or the driver",
    }[ending.how]


def _print_json(
    targets: Sequence[CudaProcess], endings: Sequence[Ending], *, dry_run: bool
) -> None:
    how = {ending.process.pid: ending.how for ending in endings}
    processes: list[dict[str, Any]] = [
        {**asdict(process), "result": how.get(process.pid)} for process in targets
    ]
    print(json.dumps({"dry_run": dry_run, "processes": processes}, indent=2))


def _row(process: CudaProcess) -> list[str]:
    return [
        str(process.pid),
        process.user,
        process.command,
        ", ".join(map(str, process.gpus)),
        "?" if process.used_bytes is None else str(process.used_bytes // MIB),
    ]


def _number(processes: int) -> str:
    return "this process" if processes == 1 else f"these {processes} processes"


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: accepted is a number of seconds, 0 or more")
    return value
