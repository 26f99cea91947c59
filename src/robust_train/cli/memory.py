"""``robust-train memory`` and ``cleanup``: the memory of GPUs and of a live run.

What only a process itself can do is requested of the live run, which does it at its next step
boundary.
"""

from __future__ import annotations

import os
import shlex
import sys
from argparse import Namespace

from robust_train.cli.command import Answer, CommandFailed, Table
from robust_train.cli.gpus import machine_memory
from robust_train.folder.requests import ControlError, ask
from robust_train.folder.run_list import NoLiveRun, NothingAlive, Run, choose_run
from robust_train.memory import cuda
from robust_train.model.errors import EXIT_BAD_CONFIG
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


def clear(arguments: Namespace) -> Answer:
    """Have a live run release what it does not use."""
    return _requested("clear", arguments.run, force=arguments.force)


def reset(arguments: Namespace) -> Answer:
    """Have a live run reset its peaks."""
    return _requested("reset", arguments.run)


def fraction(arguments: Namespace) -> Answer:
    """Limit a live run to a share of its device's memory."""
    return _requested("fraction", arguments.run, fraction=arguments.fraction)


def snapshot(arguments: Namespace) -> Answer:
    """Have a live run write what it has allocated."""
    return _requested("snapshot", arguments.run)


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
    except (NoLiveRun, ControlError) as problem:
        if arguments.run is not None:
            raise
        return Answer(data, parts, [str(problem)])
    return Answer(
        {**data, "live_run": {"run": run.id, **answer}},
        [*parts, *_described(run, answer, {"now": "after"})],
    )


def cleanup(arguments: Namespace) -> Answer:
    """Have a live run release what it does not use, then show the machine's memory."""
    if arguments.stats_only and arguments.force:
        problem = "--force: not allowed with argument --stats-only"
        raise CommandFailed(problem, EXIT_BAD_CONFIG)
    if arguments.stats_only:
        return info(arguments)
    answer = clear(arguments)
    machine = machine_memory()
    return Answer(
        {**answer.data, **machine.data},
        [*answer.shown, *machine.shown],
        error=answer.error,
    )


def enable(arguments: Namespace) -> Answer:
    """Print lines for POSIX shells that turn expandable segments on for later programs.

    TensorFloat32 is left alone: it changes results and saves no memory.
    """
    exported = cuda.exported_expandable_segments(os.environ)
    settings = cuda.allocator_settings(os.environ, expandable_segments=True)
    line = f"export {cuda.VARIABLE}={shlex.quote(settings)}"
    if exported is not None:
        line = (
            f"# {cuda.VARIABLE} has expandable_segments:{exported} already, which stays"
        )
    shown = [line]
    if sys.stdout.isatty():  # not inside $(…)
        shown.append('to set it in this shell: eval "$(robust-train memory enable)"')
    return Answer(
        {"variable": cuda.VARIABLE, "value": settings, "lines": [line]}, shown
    )


def _requested(action: str, which: str | None, **options: Json) -> Answer:
    """Have a live run carry out an action; return its answer, or what helps without a run."""
    try:
        run = choose_run(which)
        answer = ask(run, f"memory_{action}", **options)
    except NothingAlive as error:
        instead = _WITHOUT_A_RUN[action].format(**options)
        return Answer(error=f"{error}; {instead}")
    except (NoLiveRun, ControlError) as error:
        return Answer(error=str(error))
    columns = {"before": "before", "after": "after"}
    return Answer({"run": run.id, **answer}, _described(run, answer, columns))


def _described(
    run: Run, answer: dict[str, Json], columns: dict[str, str]
) -> list[str | Table]:
    """Return a run's answer with its figures in MiB; ``columns`` maps titles to parts of it."""
    rows = []
    for name in _FIGURES:
        if answer["after"].get(name) is not None:
            figures = [_mib(answer[part][name]) for part in columns.values()]
            rows.append([name.replace("_", " "), *figures])
    sentence = f"run {run.id} (pid {run.pid}, {run.run_dir}): {answer['sentence']}"
    return [sentence, Table(("MiB", *columns), rows, columns)]


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:.1f}"
