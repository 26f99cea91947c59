"""``robust-train memory``: shows and manages the memory of GPUs and of a live run.

Only a process itself can, for example, empty its cache. So the command requests such actions from
the live run, which carries them out at its next step boundary. ``memory kill`` ends processes.
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

from robust_train.cli.command import Answer, Table, ask_user
from robust_train.cli.machine import show_gpus
from robust_train.folder.live import ask
from robust_train.folder.run_list import KnownRun, NothingAliveError, choose_run
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.processes import CudaProcess, is_there, list_cuda_processes, send_signal
from robust_train.host import allocator
from robust_train.host.memory import read_host_memory
from robust_train.model.errors import EXIT_FAILED, NotDoneError
from robust_train.model.events import Json
from robust_train.readable import MIB

# Advice if no run is alive, by action.
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

_FIGURES = ("allocated", "reserved", "peak", "largest_free_block", "free")

_PROCESS_COLUMNS = ("pid", "user", "command", "GPUs", "MiB")
_WAIT_SECONDS = 10.0  # for processes to end, after SIGTERM and again after SIGKILL
_POLL_SECONDS = 0.05
# The result for each process that `memory kill` has to end.
_SENTENCES = {
    "ended": "has ended",
    "killed": f"had not ended {_WAIT_SECONDS:g} s after SIGTERM and was killed",
    "gone": "had ended already",
    "not permitted": "may not be signalled by this user",
    "still there": "is still there after SIGKILL: it waits in the kernel or the driver",
}
_FAILURES = {"not permitted", "still there"}


def request(arguments: Namespace) -> Answer:
    """Send the request that the command names to a live run. If no run is alive, refuse and explain
    what to do instead."""
    action = arguments.command.removeprefix("memory ")
    given = vars(arguments)
    options = {name: given[name] for name in ("force", "fraction") if name in given}
    try:
        run = choose_run(arguments.run, command=f"{arguments.command} --run")
        answer = ask(run, f"memory_{action}", **options)
    except NothingAliveError as error:
        instead = _WITHOUT_A_RUN[action].format(**options)
        raise NotDoneError(f"{error}; {instead}") from error
    return Answer({"run": run.id, **answer}, _format_answer(run, answer))


def info(arguments: Namespace) -> Answer:
    """Show a live run's own figures and the machine's.

    Only the machine is shown if ``--run`` is not given and there is no live run, or more than one.
    """
    try:
        run = choose_run(arguments.run, command="memory info --run")
        answer = ask(run, "memory_info")
        live = {"run": run.id, **answer}
        of_run = Answer({"live_run": live}, _format_answer(run, answer))
    except NotDoneError as problem:
        if arguments.run is not None:
            raise
        warnings = [] if isinstance(problem, NothingAliveError) else [str(problem)]
        of_run = Answer({"live_run": None}, warnings=warnings)
    return _add_machine(of_run, arguments)


def _add_machine(answer: Answer, arguments: Namespace) -> Answer:
    """Return the answer with the listing of ``robust-train gpus`` and the host's memory added."""
    machine = show_gpus(arguments)
    host = read_host_memory()
    figures = {"available_bytes": host.available, "total_bytes": host.total}
    shown = list(answer.shown) + list(machine.shown)
    if host.total is not None and host.available is not None:
        shown.append(f"host memory: {host.available // MIB} of {host.total // MIB} MiB available")
    return replace(answer, data={**answer.data, **machine.data, "host": figures}, shown=shown)


def enable(arguments: Namespace) -> Answer:
    """Print lines for POSIX shells that turn expandable segments on for later programs.

    TensorFloat32 is not turned on, because it changes results and saves no memory.
    """
    exported = allocator.exported_expandable_segments(os.environ)
    settings = allocator.allocator_settings(os.environ, expandable_segments=True)
    if exported is None:
        line = f"export {allocator.VARIABLE}={shlex.quote(settings)}"
    else:
        line = f"# {allocator.VARIABLE} has expandable_segments:{exported} already, which stays"
    data = {"variable": allocator.VARIABLE, "value": settings, "lines": [line]}
    return Answer(data, [line])


def _format_answer(run: KnownRun, answer: dict[str, Json]) -> list[str | Table]:
    """Return a run's answer for people, with a table of its figures before and after in MiB."""
    moments = [moment for moment in ("before", "after") if moment in answer]
    rows = []
    for name in _FIGURES:
        if answer["after"].get(name) is None:
            continue
        row = [name.replace("_", " ")]
        for moment in moments:
            size = answer[moment][name]
            row.append("-" if size is None else f"{size / MIB:.1f}")
        rows.append(row)
    sentence = f"run {run.id} (pid {run.pid}, {run.run_dir}): {answer['sentence']}"
    return [sentence, Table(["MiB", *moments], rows)]


def kill(arguments: Namespace) -> Answer:
    """List the caller's CUDA processes, ask, and end them."""
    inventory = read_inventory()
    if inventory.problem is not None:
        raise NotDoneError(f"CUDA processes cannot be listed: {inventory.problem}")
    me = psutil.Process()
    ancestors = {process.pid for process in me.parents()} | {me.pid}
    processes = list_cuda_processes(inventory)
    targets, refusals = choose_targets(processes, arguments.pid, os.getuid(), ancestors)
    if refusals:
        reasons = "; ".join(f"pid {pid} {why}" for pid, why in refusals.items())
        refused = [{"pid": pid, "reason": why} for pid, why in refusals.items()]
        return Answer({"refused": refused}, error=f"{reasons}; nothing was ended")
    if not targets:
        nothing = "no CUDA process of yours runs on this machine's GPUs"
        return Answer({"dry_run": arguments.dry_run, "processes": []}, [nothing])
    targets_in_words = "this process" if len(targets) == 1 else f"these {len(targets)} processes"
    if not arguments.json:
        Table(_PROCESS_COLUMNS, [_row(process) for process in targets]).print()
    results: dict[CudaProcess, str | None] = dict.fromkeys(targets)
    lines = [f"would end {targets_in_words}; no signal was sent (--dry-run)"]
    if not arguments.dry_run:
        if not ask_user(f"end {targets_in_words}?", arguments):
            return Answer(shown=["nothing was ended"], exit_code=EXIT_FAILED)
        lines = []
        for process, result in end_all(targets).items():
            results[process] = result
            lines.append(f"{process.command} (pid {process.pid}) {_SENTENCES[result]}")
    listed = []
    for process, outcome in results.items():
        listed.append({**asdict(process), "user": process.user, "result": outcome})
    has_failed = any(outcome in _FAILURES for outcome in results.values())
    data = {"dry_run": arguments.dry_run, "processes": listed}
    return Answer(data, lines, exit_code=EXIT_FAILED if has_failed else 0)


def choose_targets(
    listed: tuple[Sequence[CudaProcess], Mapping[int, str]],
    named: Sequence[int],
    uid: int,
    ancestors: Set[int],
) -> tuple[list[CudaProcess], dict[int, str]]:
    """Return the processes to end, and for each refused process id the reason.

    Args:
        listed: the processes that NVML lists, and for some other process ids why NVML does not list
            them.
        named: process ids to end, empty for all processes of the caller.
        uid: the caller's user. Only 0 may name processes of other users.
        ancestors: the caller itself and all its parents.
    """
    processes, unlisted = listed
    by_pid = {process.pid: process for process in processes}
    targets = []
    refusals = {}
    for pid in dict.fromkeys(named) if named else by_pid:
        process = by_pid.get(pid)
        if pid in ancestors:
            refusals[pid] = "is this command, or one of its parents"
        elif process is None:
            unknown = "is not a CUDA process: NVML does not list it"
            refusals[pid] = unlisted.get(pid, unknown)
        elif process.uid != uid and not (named and uid == 0):
            refusals[pid] = f"belongs to {process.user}"
        else:
            targets.append(process)
    # Without names, processes of other users are left out silently.
    return targets, refusals if named else {}


def end_all(
    processes: Iterable[CudaProcess], seconds: float = _WAIT_SECONDS
) -> dict[CudaProcess, str]:
    """Send SIGTERM to all processes, and SIGKILL to processes that are still alive after
    ``seconds``. Returns the result for each, a key of the sentences above.

    Waits equally long for killed processes, because a process inside the driver may need a while. A
    process that only has the same process id, because it was started later, gets no signal.
    """
    results = dict.fromkeys(processes, "gone")
    left = list(results)
    for signum, result in ((signal.SIGTERM, "ended"), (signal.SIGKILL, "killed")):
        for process in left:
            try:
                # A process that ended just before SIGKILL counts as ended, not as killed.
                if send_signal(process.pid, process.started, signum):
                    results[process] = result
            except PermissionError:
                results[process] = "not permitted"
        left = [process for process in left if results[process] == result]
        deadline = time.monotonic() + seconds
        while left and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            left = [process for process in left if is_there(process.pid, process.started)]
    return results | dict.fromkeys(left, "still there")


def _row(process: CudaProcess) -> list[object]:
    return [
        process.pid,
        process.user,
        process.command,
        ", ".join(str(index) for index in process.gpus),
        "?" if process.used_bytes is None else process.used_bytes // MIB,
    ]
