"""``robust-train memory kill``: end your own CUDA processes."""

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

from robust_train.cli.command import Answer, CommandFailed, Table
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.processes import (
    CudaProcess,
    CudaProcesses,
    is_there,
    list_cuda_processes,
    send_signal,
)
from robust_train.model.errors import EXIT_BAD_CONFIG, EXIT_FAILED
from robust_train.readable import MIB

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
    """The processes to end, and why others that were named must not be ended."""

    targets: tuple[CudaProcess, ...]
    refusals: dict[int, str]


class Ending(NamedTuple):
    """What became of a process: ``ended`` (after SIGTERM), ``killed`` (SIGKILL), ``gone`` (before
    any signal), ``not permitted``, or ``still there``."""

    process: CudaProcess
    how: str


def kill(arguments: argparse.Namespace) -> Answer | int:
    """List the caller's CUDA processes, ask, and end them."""
    inventory = read_inventory()
    if inventory.problem is not None:
        raise CommandFailed(f"CUDA processes cannot be listed: {inventory.problem}")
    me = psutil.Process()
    ancestors = {process.pid for process in (me, *me.parents())}
    listed = list_cuda_processes(inventory)
    targets, refusals = choose(
        listed, arguments.pid, uid=os.getuid(), ancestors=ancestors
    )
    if refusals:
        reasons = "; ".join(f"pid {pid} {why}" for pid, why in refusals.items())
        refused = [{"pid": pid, "reason": why} for pid, why in refusals.items()]
        error = f"{reasons}; nothing was ended"
        return Answer({"refused": refused}, error=error)
    try:
        return _show_and_end(targets, arguments)
    except KeyboardInterrupt:
        print("\nno further signal was sent", file=sys.stderr)
        return EXIT_INTERRUPTED


def choose(
    listed: CudaProcesses, named: Sequence[int], *, uid: int, ancestors: Collection[int]
) -> Choice:
    """Decide which of the listed processes to end.

    Args:
        listed: what NVML lists.
        named: process ids to end; empty for all of the caller's own.
        uid: the caller's user; only 0 may name processes of others.
        ancestors: the caller itself and all its parents.
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
            refusals[pid] = listed.others.get(
                pid, "is not a CUDA process: NVML does not list it"
            )
        elif process.uid != uid and uid != 0:
            refusals[pid] = f"belongs to {process.user}"
        else:
            targets.append(process)
    return Choice(tuple(targets), refusals)


def end_all(
    processes: Sequence[CudaProcess], *, grace_seconds: float, last_seconds: float
) -> list[Ending]:
    """Send SIGTERM to all, then SIGKILL to those that are still there after ``grace_seconds``.

    Wait ``last_seconds`` for the killed ones, because a process inside the driver may need a while.
    A process that has only inherited the process id is never signalled.
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
        left = [
            process for process in processes if is_there(process.pid, process.started)
        ]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(_POLL_SECONDS)


def _show_and_end(
    targets: Sequence[CudaProcess], arguments: argparse.Namespace
) -> Answer:
    if not targets:
        nothing = "no CUDA process of yours runs on this machine's GPUs"
        return Answer({"dry_run": arguments.dry_run, "processes": []}, [nothing])
    if not arguments.json:
        Table(COLUMNS, [_row(process) for process in targets], {"pid", "MiB"}).print()
    number = "this process" if len(targets) == 1 else f"these {len(targets)} processes"
    if arguments.dry_run:
        processes = [{**asdict(process), "result": None} for process in targets]
        return Answer(
            {"dry_run": True, "processes": processes},
            [f"would end {number}; no signal was sent (--dry-run)"],
        )
    if not arguments.yes:
        if arguments.json or not sys.stdin.isatty():
            problem = (
                "not a terminal: pass --yes to end them, or --dry-run to only list them"
            )
            raise CommandFailed(problem, EXIT_BAD_CONFIG)
        if not _confirmed(f"end {number}? [y/N] "):
            return Answer(shown=["nothing was ended"], exit_code=EXIT_FAILED)
    endings = end_all(
        targets, grace_seconds=arguments.grace, last_seconds=_LAST_SECONDS
    )
    processes = [{**asdict(ending.process), "result": ending.how} for ending in endings]
    lines = []
    for process, how in endings:
        sentence = _SENTENCES[how].format(grace=arguments.grace)
        lines.append(f"{process.command} (pid {process.pid}) {sentence}")
    is_left = any(ending.how in ("not permitted", "still there") for ending in endings)
    return Answer(
        {"dry_run": False, "processes": processes},
        lines,
        exit_code=EXIT_FAILED if is_left else 0,
    )


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
