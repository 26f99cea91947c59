"""Tables: ruled on a terminal, plain aligned columns in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right_aligned: Collection[str] = ()
) -> None:
    """Print ``rows`` under their ``columns``."""
    if sys.stdout.isatty():
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
        return
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        cells = (
            cell.rjust(width) if name in right_aligned else cell.ljust(width)
            for cell, width, name in zip(line, widths, columns, strict=True)
        )
        print("  ".join(cells).rstrip())
