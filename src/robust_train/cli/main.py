"""The ``robust-train`` command."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

USAGE = """usage: robust-train COMMAND [OPTIONS]

commands:
  gpus     table of this machine's GPUs and who holds them  [--json]
  queue    jobs that run and wait on this host, and why     [--json] [cancel ID]
  doctor   each GPU usable or why not, and the queue        [--json] [--clear GPU]
  memory   info | clear | reset | fraction | enable | snapshot | kill   [--json] [--run ID|PATH|PID]
  cleanup  look, and have a live run give back what it can  [--json] [--stats-only | --force]
"""

COMMANDS = ("gpus", "queue", "doctor", "memory", "cleanup")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    command, *rest = arguments
    if command not in COMMANDS:
        accepted = ", ".join(COMMANDS)
        print(f"robust-train {command}: no such command; accepted are {accepted}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"robust_train.cli.{command}")
    code: int = module.main(rest)
    return code


if __name__ == "__main__":
    sys.exit(main())
