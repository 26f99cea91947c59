"""What the commands share: their command line, tables, JSON, and a mistake in one line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from robust_train.errors import EXIT_BAD_CONFIG
from robust_train.runfolder.summary import aligned

EXIT_NOT_DONE = 1


class Parser(argparse.ArgumentParser):
    """The command line of ``robust-train COMMAND``; a mistake in it costs one line."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and end with exit code 2."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIG)

    def add_json(self) -> None:
        """Add the option ``--json``."""
        self.add_argument("--json", action="store_true", help="for programs; sizes in bytes")

    def add_run(self) -> None:
        """Add the option that names a run."""
        which = "which run; default: the only one of yours that is alive"
        self.add_argument("--run", metavar="ID|PATH|PID", help=which)


def print_json(content: Any) -> None:
    """Print for programs."""
    print(json.dumps(content, indent=2))


def fail(command: str, message: str, as_json: bool = False, code: int = EXIT_NOT_DONE) -> int:
    """Print why ``robust-train COMMAND`` failed; return the exit code."""
    if as_json:
        print_json({"error": message})
    print(f"robust-train {command}: {message}", file=sys.stderr)
    return code


def plain_lines(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right_aligned: Collection[str] = ()
) -> list[str]:
    """Return ``rows`` under their ``columns``, one line each."""
    right = frozenset(n for n, name in enumerate(columns) if name in right_aligned)
    return aligned([columns, *rows], right)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right_aligned: Collection[str] = ()
) -> None:
    """Print ``rows`` under their ``columns``: ruled on a terminal, plain in a pipe."""
    if not sys.stdout.isatty():
        print("\n".join(plain_lines(columns, rows, right_aligned)))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in columns:
        # a UUID is there to be copied, so it folds rather than lose its end
        table.add_column(
            name, justify="right" if name in right_aligned else "left", overflow="fold"
        )
    for row in rows:
        # as text: a name may contain what rich reads as markup
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
