"""The ``robust-train`` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

USAGE = """usage: robust-train COMMAND [OPTIONS]

commands:
  gpus    table of this machine's GPUs and who holds them  [--json]
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    command, *rest = arguments
    if command == "gpus":
        from robust_train.cli import gpus

        return gpus.main(rest)
    print(f"robust-train {command}: no such command; accepted is gpus", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
