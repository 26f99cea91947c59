"""``robust-train memory``: the memory of GPUs and of a live run.

Actions that only a process itself can take are requested from the live run, which carries them out
at its next step boundary. ``memory kill`` ends processes.
"""

from __future__ import annotations

import os
import shlex
import signal
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, replace

import psutil

from robust_train.cli.command import Answer, Table, confirmed
from robust_train.cli.machine import gpus
from robust_train.folder.live import ask
from robust_train.folder.run_list import KnownRun, NothingAliveError, choose_run
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.processes import CudaProcess, is_there, list_cuda_processes, send_signal
from robust_train.host import allocator
from robust_train.host.memory import read_host_memory
from robust_train.model.errors import EXIT_FAILED, NotDoneError
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
"""Advice if no run is alive, by action."""

_FIGURES = ("allocated", "reserved", "peak", "largest_free_block", "free")

_OF_PROCESSES = ("pid", "user", "command", "GPUs", "MiB")
_SECONDS = 10.0
_POLL_SECONDS = 0.05
_SENTENCES = {
    "ended": "has ended",
    "killed": f"had not ended {_SECONDS:g} s after SIGTERM and was killed",
    "gone": "had ended already",
    "not permitted": "may not be signalled by this user",
    "still there": "is still there after SIGKILL: it waits in the kernel or the driver",
}
"""The fate of a process that has to end: after SIGTERM, SIGKILL, before any signal …"""
_LEFT = {"not permitted", "still there"}


def request(arguments: Namespace) -> Answer:
    """Send the request named by the command to a live run, or without a run, explain what to do."""
    action = arguments.command.removeprefix("memory ")
    given = vars(arguments)
    options = {name: given[name] for name in ("force", "fraction") if name in given}
    try:
        run = choose_run(arguments.run, command=f"{arguments.command} --run")
        answer = ask(run, f"memory_{action}", **options)
    except NothingAliveError as error:
        instead = _WITHOUT_A_RUN[action].format(**options)
        raise NotDoneError(f"{error}; {instead}") from error
    return Answer({"run": run.id, **answer}, _described(run, answer))


def info(arguments: Namespace) -> Answer:
    """Show a live run's own figures and the machine's.

    Without ``--run``, no live run, or several, are not an error: only the machine is shown.
    """
    try:
        run = choose_run(arguments.run, command="memory info --run")
        answer = ask(run, "memory_info")
        live = {"run": run.id, **answer}
        answer_shown = Answer({"live_run": live}, _described(run, answer))
    except NotDoneError as problem:
        if arguments.run is not None:
            raise
        is_none = isinstance(problem, NothingAliveError)
        warnings = [] if is_none else [str(problem)]
        answer_shown = Answer({"live_run": None}, warnings=warnings)
    return _with_machine(answer_shown, arguments)


def _with_machine(answer: Answer, arguments: Namespace) -> Answer:
    """Return an answer with what ``gpus`` shows, and the host's memory."""
    machine = gpus(arguments)
    host = read_host_memory()
    figures = {"available_bytes": host.available, "total_bytes": host.total}
    shown = list(answer.shown) + list(machine.shown)
    if host.total is not None and host.available is not None:
        shown.append(f"host memory: {host.available // MIB} of {host.total // MIB} MiB available")
    return replace(answer, data={**answer.data, **machine.data, "host": figures}, shown=shown)


def enable(arguments: Namespace) -> Answer:
    """Print lines for POSIX shells that turn expandable segments on for later programs.

    TensorFloat32 is left alone: it changes results and saves no memory.
    """
    exported = allocator.exported_expandable_segments(os.environ)
    settings = allocator.allocator_settings(os.environ, expandable_segments=True)
    line = f"export {allocator.VARIABLE}={shlex.quote(settings)}"
    if exported is not None:
        line = f"# {allocator.VARIABLE} has expandable_segments:{exported} already, which stays"
    data = {"variable": allocator.VARIABLE, "value": settings, "lines": [line]}
    return Answer(data, [line])


def _described(run: KnownRun, answer: dict[str, Json]) -> list[str | Table]:
    """Return a run's answer, with its figures before and after in MiB as far as it has them."""
    parts = [part for part in ("before", "after") if part in answer]
    columns = ["MiB"]
    rows = []
    columns += parts
    for name in _FIGURES:
        if answer["after"].get(name) is not None:
            row = [name.replace("_", " ")]
            for part in parts:
                size = answer[part][name]
                row.append("-" if size is None else f"{size / MIB:.1f}")
            rows.append(row)
    sentence = f"run {run.id} (pid {run.pid}, {run.run_dir}): {answer['sentence']}"
    return [sentence, Table(columns, rows)]


def kill(arguments: Namespace) -> Answer:
    """List the caller's CUDA processes, ask, and end them."""
    inventory = read_inventory()
    if inventory.problem is not None:
        raise NotDoneError(f"CUDA processes cannot be listed: {inventory.problem}")
    me = psutil.Process()
    targets, refusals = choose(
        list_cuda_processes(inventory),
        arguments.pid,
        os.getuid(),
        {process.pid for process in me.parents()} | {me.pid},
    )
    if refusals:
        reasons = "; ".join(f"pid {pid} {why}" for pid, why in refusals.items())
        refused = [{"pid": pid, "reason": why} for pid, why in refusals.items()]
        return Answer({"refused": refused}, error=f"{reasons}; nothing was ended")
    if not targets:
        nothing = "no CUDA process of yours runs on this machine's GPUs"
        return Answer({"dry_run": arguments.dry_run, "processes": []}, [nothing])
    number = "this process" if len(targets) == 1 else f"these {len(targets)} processes"
    if not arguments.json:
        Table(_OF_PROCESSES, [_row(process) for process in targets]).print()
    how: dict[CudaProcess, str | None] = dict.fromkeys(targets)
    lines = [f"would end {number}; no signal was sent (--dry-run)"]
    if not arguments.dry_run:
        if not confirmed(f"end {number}?", arguments):
            return Answer(shown=["nothing was ended"], exit_code=EXIT_FAILED)
        endings = end_all(targets)
        how |= endings
        lines = [
            f"{process.command} (pid {process.pid}) {_SENTENCES[result]}"
            for process, result in endings.items()
        ]
    ended = [
        {**asdict(process), "user": process.user, "result": result}
        for process, result in how.items()
    ]
    any_left = any(result in _LEFT for result in how.values())
    return Answer(
        {"dry_run": arguments.dry_run, "processes": ended},
        lines,
        exit_code=EXIT_FAILED if any_left else 0,
    )


def choose(
    listed: tuple[Sequence[CudaProcess], Mapping[int, str]],
    named: Sequence[int],
    uid: int,
    ancestors: Set[int],
) -> tuple[list[CudaProcess], dict[int, str]]:
    """Return the listed processes to end, and why other named processes must not be ended.

    Args:
        listed: the processes that NVML lists, and by process id, why it does not list some others.
        named: process ids to end, empty for all of the caller's own.
        uid: the caller's user. Only 0 may name processes of others.
        ancestors: the caller itself and all its parents.
    """
    processes, others = listed
    by_pid = {process.pid: process for process in processes}
    targets = []
    refusals = {}
    for pid in dict.fromkeys(named) if named else by_pid:
        process = by_pid.get(pid)
        if pid in ancestors:
            refusals[pid] = "is this command itself, or what it was started from"
        elif process is None:
            unknown = "is not a CUDA process: NVML does not list it"
            refusals[pid] = others.get(pid, unknown)
        elif process.uid != uid and not (named and uid == 0):
            refusals[pid] = f"belongs to {process.user}"
        else:
            targets.append(process)
    return targets, refusals if named else {}


def end_all(processes: Iterable[CudaProcess], seconds: float = _SECONDS) -> dict[CudaProcess, str]:
    """Send SIGTERM to all, then SIGKILL to those that are still alive after ``seconds``. Returns
    the outcome for each.

    Waits equally long for killed processes, because a process inside the driver may need a while. A
    process that has only inherited the process id is never signalled.
    """
    how = dict.fromkeys(processes, "gone")
    left = list(how)
    for signum, result in ((signal.SIGTERM, "ended"), (signal.SIGKILL, "killed")):
        for process in left:
            try:
                # A process that ended just before SIGKILL counts as ended, not as killed.
                if send_signal(process.pid, process.started, signum):
                    how[process] = result
            except PermissionError:
                how[process] = "not permitted"
        left = [process for process in left if how[process] == result]
        deadline = time.monotonic() + seconds
        while left and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            left = [process for process in left if is_there(process.pid, process.started)]
    return how | dict.fromkeys(left, "still there")


def _row(process: CudaProcess) -> list[object]:
    return [
        process.pid,
        process.user,
        process.command,
        ", ".join(map(str, process.gpus)),
        "?" if process.used_bytes is None else process.used_bytes // MIB,
    ]
