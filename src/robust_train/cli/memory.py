"""``robust-train memory`` and ``cleanup``: the memory of GPUs and of a live run.

What only a process itself can do is requested of the live run, which does it at its next step
boundary. ``memory kill`` ends processes.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict

import psutil

from robust_train.cli.command import Answer, CommandFailed, Table, confirmed
from robust_train.cli.machine import machine_memory
from robust_train.folder.live import ask
from robust_train.folder.run_list import KnownRun, NothingAlive, choose_run
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.processes import (
    CudaProcess,
    CudaProcesses,
    is_there,
    list_cuda_processes,
    send_signal,
)
from robust_train.host import allocator
from robust_train.model.errors import EXIT_BAD_CONFIG, EXIT_FAILED, NotDone
from robust_train.model.events import Json
from robust_train.readable import MIB

_WITHOUT_A_RUN = {
    "clear": "a process cannot empty another's cache. In your own program call "
    "robust_train.clear_gpu_memory(); 'robust-train memory kill' ends processes of yours that "
    "were left behind",
    "reset": "peaks are counted inside a process. In your own program call "
    "robust_train.reset_peak_memory_stats()",
    "fraction": "a limit is set inside a process. For a later run write memory.fraction={fraction} "
    "on its command line; in your own program call robust_train.set_memory_fraction({fraction})",
    "snapshot": "a snapshot is taken inside a process. For a later run "
    "memory.snapshot_on_oom=true takes one if memory runs out",
}
"""What helps if no run is alive, by action."""

_FIGURES = ("allocated", "reserved", "peak", "largest_free_block", "free")

_LAST_SECONDS = 10.0
_POLL_SECONDS = 0.05
_SENTENCES = {
    "ended": "has ended",
    "killed": "had not ended {grace:g} s after SIGTERM and was killed",
    "gone": "was gone already",
    "not permitted": "may not be signalled by this user",
    "still there": "is still there after SIGKILL: it waits in the kernel or the driver",
}
"""What becomes of a process that is to end: after SIGTERM, SIGKILL, before any signal …"""


def request(arguments: Namespace) -> Answer:
    """Have a live run do what the command is called after."""
    action = arguments.command.removeprefix("memory ")
    options = ("force", "fraction")
    given = {name: vars(arguments)[name] for name in options if name in arguments}
    return _requested(action, arguments.run, **given)


def info(arguments: Namespace) -> Answer:
    """Show the machine's memory, and a live run's own figures.

    Without ``--run`` no live run, or several, are no error: only the machine is shown.
    """
    machine = machine_memory()
    data, parts = {**machine.data, "live_run": None}, [*machine.shown]
    try:
        run = choose_run(arguments.run)
        answer = ask(run, "memory_info")
    except NothingAlive:
        return Answer(data, parts)
    except NotDone as problem:
        if arguments.run is not None:
            raise
        return Answer(data, parts, [str(problem)])
    data["live_run"] = {"run": run.id, **answer}
    return Answer(data, [*parts, *_described(run, answer, {"now": "after"})])


def cleanup(arguments: Namespace) -> Answer:
    """Have a live run release what it does not use, then show the machine's memory."""
    if arguments.stats_only and arguments.force:
        problem = "--force: not allowed with argument --stats-only"
        raise CommandFailed(problem, EXIT_BAD_CONFIG)
    if arguments.stats_only:
        return info(arguments)
    try:
        answer = _requested(
            "clear",
            arguments.run,
            force=arguments.force,
        )
    except NotDone as error:
        answer = Answer(error=str(error))
    machine = machine_memory()
    data, shown = answer.data | machine.data, [*answer.shown, *machine.shown]
    return Answer(data, shown, error=answer.error)


def enable(arguments: Namespace) -> Answer:
    """Print lines for POSIX shells that turn expandable segments on for later programs.

    TensorFloat32 is left alone: it changes results and saves no memory.
    """
    exported = allocator.exported_expandable_segments(os.environ)
    settings = allocator.allocator_settings(os.environ, expandable_segments=True)
    line = f"export {allocator.VARIABLE}={shlex.quote(settings)}"
    if exported is not None:
        line = f"# {allocator.VARIABLE} has expandable_segments:{exported} already, which stays"
    shown = [line]
    if sys.stdout.isatty():  # not inside $(…)
        shown.append('to set it in this shell: eval "$(robust-train memory enable)"')
    data = {"variable": allocator.VARIABLE, "value": settings, "lines": [line]}
    return Answer(data, shown)


def _requested(
    action: str,
    which: str | None,
    **options: Json,
) -> Answer:
    """Have a live run carry out an action; return its answer, or what helps without a run."""
    try:
        run = choose_run(which)
        answer = ask(run, f"memory_{action}", **options)
    except NothingAlive as error:
        instead = _WITHOUT_A_RUN[action].format(**options)
        raise CommandFailed(f"{error}; {instead}") from error
    columns = {"before": "before", "after": "after"}
    return Answer({"run": run.id, **answer}, _described(run, answer, columns))


def _described(
    run: KnownRun,
    answer: dict[str, Json],
    columns: dict[str, str],
) -> list[str | Table]:
    """Return a run's answer with its figures in MiB; ``columns`` maps titles to parts of it."""
    rows = []
    for name in _FIGURES:
        if answer["after"].get(name) is not None:
            sizes = [answer[part][name] for part in columns.values()]
            figures = [None if size is None else f"{size / MIB:.1f}" for size in sizes]
            rows.append([name.replace("_", " "), *figures])
    sentence = f"run {run.id} (pid {run.pid}, {run.run_dir}): {answer['sentence']}"
    return [sentence, Table(("MiB", *columns), rows)]


def kill(arguments: Namespace) -> Answer:
    """List the caller's CUDA processes, ask, and end them."""
    inventory = read_inventory()
    if inventory.problem is not None:
        raise CommandFailed(f"CUDA processes cannot be listed: {inventory.problem}")
    me = psutil.Process()
    ancestors = {process.pid for process in (me, *me.parents())}
    listed = list_cuda_processes(inventory)
    targets, refusals = choose(
        listed,
        arguments.pid,
        os.getuid(),
        ancestors,
    )
    if refusals:
        reasons = "; ".join(f"pid {pid} {why}" for pid, why in refusals.items())
        refused = [{"pid": pid, "reason": why} for pid, why in refusals.items()]
        return Answer({"refused": refused}, error=f"{reasons}; nothing was ended")
    data = {"dry_run": arguments.dry_run, "processes": []}
    if not targets:
        return Answer(data, ["no CUDA process of yours runs on this machine's GPUs"])
    if not arguments.json:
        _table(targets).print()
    number = "this process" if len(targets) == 1 else f"these {len(targets)} processes"
    if arguments.dry_run:
        data["processes"] = [{**asdict(process), "result": None} for process in targets]
        return Answer(data, [f"would end {number}; no signal was sent (--dry-run)"])
    if not confirmed(f"end {number}?", arguments):
        return Answer(shown=["nothing was ended"], exit_code=EXIT_FAILED)
    try:
        endings = end_all(
            targets,
            arguments.grace,
            _LAST_SECONDS,
        )
    except KeyboardInterrupt:
        print("\nno further signal was sent", end="", file=sys.stderr)
        raise
    data["processes"] = [
        {**asdict(process), "result": how} for process, how in endings.items()
    ]
    lines = []
    for process, how in endings.items():
        sentence = _SENTENCES[how].format(grace=arguments.grace)
        lines.append(f"{process.command} (pid {process.pid}) {sentence}")
    is_left = {"not permitted", "still there"} & {*endings.values()}
    return Answer(
        data,
        lines,
        exit_code=EXIT_FAILED if is_left else 0,
    )


def choose(
    listed: CudaProcesses,
    named: Sequence[int],
    uid: int,
    ancestors: Collection[int],
) -> tuple[list[CudaProcess], dict[int, str]]:
    """Return which of the listed processes to end, and why others that were named must not be.

    Args:
        listed: what NVML lists.
        named: process ids to end; empty for all of the caller's own.
        uid: the caller's user; only 0 may name processes of others.
        ancestors: the caller itself and all its parents.
    """
    by_pid = {process.pid: process for process in listed.processes}
    if not named:
        own = [p for p in listed.processes if p.uid == uid and p.pid not in ancestors]
        return own, {}
    refusals = {}
    for pid in named:
        process = by_pid.get(pid)
        if pid in ancestors:
            refusals[pid] = "is this command itself, or what it was started from"
        elif process is None:
            unknown = "is not a CUDA process: NVML does not list it"
            refusals[pid] = listed.others.get(pid, unknown)
        elif process.uid != uid and uid != 0:
            refusals[pid] = f"belongs to {process.user}"
    return [
        by_pid[pid] for pid in dict.fromkeys(named) if pid not in refusals
    ], refusals


def end_all(
    processes: Sequence[CudaProcess],
    grace_seconds: float,
    last_seconds: float,
) -> dict[CudaProcess, str]:
    """Send SIGTERM to all, then SIGKILL to those that are still there after ``grace_seconds``;
    return what became of each.

    Wait ``last_seconds`` for the killed ones, because a process inside the driver may need a while.
    A process that has only inherited the process id is never signalled.
    """
    how = {process: _send(process, signal.SIGTERM, "ended") for process in processes}
    asked = [process for process in processes if how[process] == "ended"]
    for process in _still_there(asked, grace_seconds):
        sent = _send(process, signal.SIGKILL, "killed")
        # one that ended just before SIGKILL did so by itself
        how[process] = "ended" if sent == "gone" else sent
    killed = [process for process in processes if how[process] == "killed"]
    how |= dict.fromkeys(_still_there(killed, last_seconds), "still there")
    return how


def _send(
    process: CudaProcess,
    signum: signal.Signals,
    sent: str,
) -> str:
    try:
        return (
            sent
            if send_signal(
                process.pid,
                process.started,
                signum,
            )
            else "gone"
        )
    except PermissionError:
        return "not permitted"


def _still_there(processes: Iterable[CudaProcess], seconds: float) -> list[CudaProcess]:
    """Wait for the processes to end; return those that have not."""
    deadline = time.monotonic() + seconds
    while True:
        left = [one for one in processes if is_there(one.pid, one.started)]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(_POLL_SECONDS)


def _table(processes: Sequence[CudaProcess]) -> Table:
    rows = []
    for process in processes:
        size = "?" if process.used_bytes is None else process.used_bytes // MIB
        gpus = ", ".join(map(str, process.gpus))
        rows.append([process.pid, process.user, process.command, gpus, size])
    return Table(("pid", "user", "command", "GPUs", "MiB"), rows)
