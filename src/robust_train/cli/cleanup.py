"""``robust-train cleanup``: show the memory, and have the live run release what it can."""

from __future__ import annotations

from collections.abc import Sequence

from robust_train.cli.live_run import add_run_argument, request
from robust_train.cli.machine_memory import print_machine_memory, read_machine_memory
from robust_train.cli.memory import WITHOUT_A_RUN, info
from robust_train.cli.parser import Parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code.

    0: done. 1: there is no live run to clean up, or it refused. 2: wrong usage.
    """
    parser = Parser(
        prog="robust-train cleanup",
        description="Shows who holds memory, and has the live run release what it does not use.",
    )
    parser.add_argument("--json", action="store_true", help="for programs; sizes in bytes")
    add_run_argument(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--stats-only", action="store_true", help="only show")
    what.add_argument("--force", action="store_true", help="as robust-train memory clear --force")
    arguments = parser.parse_args(argv)
    if arguments.stats_only:
        return info("cleanup", arguments.run, as_json=arguments.json)
    code = request(
        "cleanup",
        arguments.run,
        "memory_clear",
        as_json=arguments.json,
        alone=WITHOUT_A_RUN["clear"],
        force=arguments.force,
    )
    if not arguments.json:
        # after it, so that the driver's figures are those that count now
        print_machine_memory(read_machine_memory())
    return code
