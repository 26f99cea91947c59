"""``robust-train memory`` and ``cleanup``: show the memory of GPUs and of a live run, clear it,
limit it."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from robust_train.cli import kill
from robust_train.cli.machine_memory import print_machine_memory, read_machine_memory
from robust_train.cli.output import EXIT_NOT_DONE, Parser, fail, print_json, print_table
from robust_train.events import Json
from robust_train.memory import allocator
from robust_train.runfolder.requests import ControlError, ask
from robust_train.runfolder.run_list import NoLiveRun, NothingAlive, Run, choose_run
from robust_train.values import MIB

_WITHOUT_A_RUN = {
    "clear": "a process cannot empty another's cache. In a program of yours call "
    "robust_train.clear_gpu_memory(); 'robust-train memory kill' ends processes of yours that "
    "were left behind",
    "reset": "peaks are counted inside of a process. In a program of yours call "
    "robust_train.reset_peak_memory_stats()",
    "fraction": "a limit is set inside of a process. For a run to come write memory.fraction={0} "
    "on its command line, and in a program of yours call robust_train.set_memory_fraction({0})",
    "snapshot": "a snapshot is taken inside of a process. For a run to come "
    "memory.snapshot_on_oom=true takes one when memory runs out",
}
"""What can and cannot be done where no run is alive, by action."""

ACTIONS = ("info", "clear", "reset", "fraction", "enable", "snapshot", "kill")
_OPTIONS = ("force", "fraction")
_FIGURES = ("allocated", "reserved", "peak", "largest_free_block", "free")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``memory ACTION``; return the exit code. 0: done. 1: it could not be done: no live run,
    or the run refused, or a process is still there. 2: wrong usage. 130: Ctrl-C."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    action = arguments.action
    if action is None:
        parser.error(f"an action is needed: {', '.join(ACTIONS)}")
    if action == "info":
        return _info("memory info", arguments.run, as_json=arguments.json)
    if action == "enable":
        return _enable(as_json=arguments.json)
    if action == "kill":
        return kill.run(arguments)
    options = {name: value for name, value in vars(arguments).items() if name in _OPTIONS}
    return _request(f"memory {action}", action, arguments, options)


def cleanup(argv: Sequence[str] | None = None) -> int:
    """Run ``cleanup``; return the exit code: 1 if there is no live run to clean up, or it refused,
    2 for wrong usage."""
    parser = Parser(
        prog="robust-train cleanup",
        description="Shows who holds memory, and has the live run release what it does not use.",
    )
    parser.add_json()
    parser.add_run()
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--stats-only", action="store_true", help="only show")
    what.add_argument("--force", action="store_true", help="as robust-train memory clear --force")
    arguments = parser.parse_args(argv)
    if arguments.stats_only:
        return _info("cleanup", arguments.run, as_json=arguments.json)
    return _request("cleanup", "clear", arguments, {"force": arguments.force})


def _request(
    command: str, action: str, arguments: argparse.Namespace, options: dict[str, Json]
) -> int:
    """Have a live run carry out an action and print the answer; return the exit code. ``cleanup``
    also shows the machine's memory as it is after that."""
    run = None
    try:
        found = choose_run(arguments.run)
        answer = {"run": found.id, **ask(found, f"memory_{action}", **options)}
        run = found
    except (NoLiveRun, ControlError) as error:
        instead = _WITHOUT_A_RUN[action].format(*options.values())
        problem = f"{error}; {instead}" if isinstance(error, NothingAlive) else str(error)
        answer = {"error": problem}
        fail(command, problem)
    machine = read_machine_memory() if command == "cleanup" else {}
    if arguments.json:
        print_json({**answer, **machine})
        return 0 if run else EXIT_NOT_DONE
    if run is not None:
        _print_answer(run, answer)
    if machine:
        print_machine_memory(machine)
    return 0 if run else EXIT_NOT_DONE


def _print_answer(run: Run, answer: dict[str, Json], *, only_now: bool = False) -> None:
    """Print an answer with the figures before and after in MiB, or only now's."""
    print(f"run {run.id} (pid {run.pid}, {run.run_dir}): {answer['sentence']}")
    columns = {"now": "after"} if only_now else {"before": "before", "after": "after"}
    rows = [
        [name.replace("_", " "), *(_mib(answer[key][name]) for key in columns.values())]
        for name in _FIGURES
        if answer["after"].get(name) is not None
    ]
    print_table(("MiB", *columns), rows, columns)


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:.1f}"


def _info(command: str, which: str | None, *, as_json: bool) -> int:
    """Print the machine's memory, and a live run's own figures; return the exit code. Where no run
    was named, none or several are no error: only the machine's part is printed."""
    machine = read_machine_memory()
    run, answer = None, {}
    try:
        run = choose_run(which)
        answer = ask(run, "memory_info")
    except NothingAlive:
        pass
    except (NoLiveRun, ControlError) as problem:
        if which is not None:
            return fail(command, str(problem), as_json)
        print(f"warning: {problem}", file=sys.stderr)
    if as_json:
        own = {"run": run.id, **answer} if run is not None and answer else None
        print_json({**machine, "live_run": own})
        return 0
    print_machine_memory(machine)
    if run is not None and answer:
        _print_answer(run, answer, only_now=True)
    return 0


def _enable(*, as_json: bool) -> int:
    """Print lines for POSIX shells: expandable segments for later programs. TensorFloat32 is left
    alone: it changes results and saves no memory."""
    exported = allocator.exported_expandable_segments(os.environ)
    settings = allocator.allocator_settings(os.environ, expandable_segments=True)
    line = f"export {allocator.VARIABLE}={shlex.quote(settings)}"
    if exported is not None:
        line = f"# {allocator.VARIABLE} has expandable_segments:{exported} already, which stays"
    if as_json:
        print_json({"variable": allocator.VARIABLE, "value": settings, "lines": [line]})
        return 0
    print(line)
    if sys.stdout.isatty():
        print('to set it in this shell: eval "$(robust-train memory enable)"', file=sys.stderr)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="robust-train memory",
        description="Memory of GPUs and of live runs. What only a process itself can do is "
        "requested of the live run, which does it at its next step boundary.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION")

    def action(name: str, help: str, *, of_a_run: bool = True) -> Parser:
        added: Parser = actions.add_parser(name, help=help, description=help)
        added.add_json()
        if of_a_run:
            added.add_run()
        return added

    action("info", "who holds memory on each GPU, and a live run's own figures")
    force = "also drop what is unreachable but uncollected, and name what is still held"
    clear = action("clear", "release what a live run holds and does not use")
    clear.add_argument("--force", action="store_true", help=force)
    action("reset", "let a live run's peaks start anew")
    fraction = action("fraction", "limit a live run to a share of its device's memory")
    fraction.add_argument("fraction", type=_share, metavar="FRACTION", help="over 0, up to 1")
    enable = 'shell lines for later programs: eval "$(robust-train memory enable)"'
    action("enable", enable, of_a_run=False)
    action("snapshot", "write what is allocated in a live run to its run folder")
    end = "end CUDA processes of your own: SIGTERM, then SIGKILL"
    kill.add_arguments(action("kill", end, of_a_run=False))
    return parser


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: accepted is a number over 0, up to 1")
    return value
