"""``robust-train memory``: show the memory of GPUs and of a live run, clear it, limit it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence

from robust_train.cli import kill
from robust_train.cli.live_run import add_run_argument, ask_run, fail, print_answer, request
from robust_train.cli.machine_memory import print_machine_memory, read_machine_memory
from robust_train.cli.parser import Parser
from robust_train.memory.allocator import (
    VARIABLE,
    allocator_settings,
    exported_expandable_segments,
)
from robust_train.runfolder.client import ControlError
from robust_train.runfolder.runs import NoLiveRun

WITHOUT_A_RUN = {
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code.

    0: done. 1: it could not be done: no live run, or the run refused, or a process is still there.
    2: wrong usage. 130: Ctrl-C.
    """
    arguments = _parser().parse_args(argv)
    action = arguments.action
    if action == "info":
        return info("memory info", arguments.run, as_json=arguments.json)
    if action == "enable":
        return _enable(os.environ, as_json=arguments.json)
    if action == "kill":
        return kill.run(arguments)
    options = {
        "clear": lambda: {"force": arguments.force},
        "fraction": lambda: {"fraction": arguments.value},
    }.get(action, dict)()
    return request(
        f"memory {action}",
        arguments.run,
        f"memory_{action}",
        as_json=arguments.json,
        alone=WITHOUT_A_RUN[action].format(*options.values()),
        **options,
    )


def info(command: str, which: str | None, *, as_json: bool) -> int:
    """Print the machine's memory, and a live run's own figures; return the exit code.

    Where no run was named, none or several are no error: the machine's part stands alone.
    """
    machine = read_machine_memory()
    found = None
    try:
        found = ask_run(which, "memory_info")
    except (NoLiveRun, ControlError) as problem:
        if which is not None:
            return fail(command, str(problem), as_json)
        print(f"warning: {problem}", file=sys.stderr)
    if as_json:
        own = None if found is None else {"run": found[0].id, **found[1]}
        print(json.dumps({**machine, "live_run": own}, indent=2))
        return 0
    print_machine_memory(machine)
    if found is not None:
        print_answer(*found, only_now=True)
    return 0


def shell_lines(environ: Mapping[str, str]) -> list[str]:
    """What ``memory enable`` prints, for POSIX shells: expandable segments for later programs.

    TensorFloat32 is left alone: it changes results and saves no memory.
    """
    exported = exported_expandable_segments(environ)
    if exported is not None:
        return [f"# {VARIABLE} has expandable_segments:{exported} already, which stays"]
    settings = allocator_settings(environ, expandable_segments=True)
    return [f"export {VARIABLE}={shlex.quote(settings)}"]


def _enable(environ: Mapping[str, str], *, as_json: bool) -> int:
    lines = shell_lines(environ)
    if as_json:
        settings = allocator_settings(environ, expandable_segments=True)
        print(json.dumps({"variable": VARIABLE, "value": settings, "lines": lines}, indent=2))
        return 0
    print("\n".join(lines))
    if sys.stdout.isatty():
        print('to set it in this shell: eval "$(robust-train memory enable)"', file=sys.stderr)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="robust-train memory",
        description="Memory of GPUs and of live runs. What only a process itself can do is "
        "requested of the live run, which does it at its next step boundary.",
    )
    common = Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="for programs; sizes in bytes")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, help: str) -> Parser:
        return actions.add_parser(name, help=help, description=help, parents=[common])

    add_run_argument(action("info", "who holds memory on each GPU, and a live run's own figures"))
    clear = action("clear", "release what a live run holds and does not use")
    add_run_argument(clear)
    clear.add_argument(
        "--force",
        action="store_true",
        help="also drop what is unreachable but uncollected, and name what is still held",
    )
    add_run_argument(action("reset", "let a live run's peaks start anew"))
    fraction = action("fraction", "limit a live run to a share of its device's memory")
    add_run_argument(fraction)
    fraction.add_argument("value", type=_share, metavar="FRACTION", help="over 0, up to 1")
    action("enable", 'shell lines for later programs: eval "$(robust-train memory enable)"')
    add_run_argument(action("snapshot", "write what is allocated in a live run to its run folder"))
    kill.add_arguments(action("kill", "end CUDA processes of your own: SIGTERM, then SIGKILL"))
    return parser


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: accepted is a number over 0, up to 1")
    return value
