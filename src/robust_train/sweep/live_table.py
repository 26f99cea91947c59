"""What a running sweep shows: a live table on a terminal, one line an event elsewhere."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from robust_train.runfolder.state import RunState

log = logging.getLogger("robust_train")

if TYPE_CHECKING:
    from rich.console import RenderableType

_REFRESH_SECONDS = 0.5
_COLUMNS = ("job", "overrides", "status", "attempt", "device", "batch", "step")
_LAST = {"pending": 2, "completed": 3}
_ENDED_BADLY = ("failed", "no_device", "interrupted", "refused", "died")
_FRAME_LINES = 7  # the table's own lines, the tally and the line with the cursor


@dataclass(frozen=True)
class LiveRow:
    """One job: its overrides that differ, its status, and ``state.json`` of its current launch."""

    job: int
    overrides: str
    status: str
    state: RunState | None = None

    def cells(self) -> tuple[str, ...]:
        """Return the texts of the columns."""
        state = self.state
        if state is None:
            return str(self.job), self.overrides, self.status, "", "", "", ""
        step: object = state.step
        if step is not None and state.total_steps:
            step = f"{step}/{state.total_steps}"
        shown = (state.attempt, state.device, state.batch_size, step)
        cells = ("" if value is None else str(value) for value in shown)
        return str(self.job), self.overrides, self.status, *cells


class LiveTable:
    """Context manager that shows a sweep on ``stream``, standard error by default."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._next_refresh = 0.0
        self.is_live = self._stream.isatty() and os.environ.get("TERM") != "dumb"

    def __enter__(self) -> LiveTable:
        if self.is_live:
            from rich.console import Console
            from rich.live import Live

            # no thread that refreshes: the sweep forks its jobs
            self._live = Live(
                console=Console(file=self._stream),
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_live:
            self._live.stop()

    def show_line(self, line: str, *, level: int = logging.INFO) -> None:
        """Show a line that stays."""
        if self.is_live:
            from rich.text import Text

            self._live.console.print(Text(line))
        else:
            log.log(level, "%s", line)

    def show(self, rows: Callable[[], Sequence[LiveRow]]) -> None:
        """Show the table as it is now, at most twice a second."""
        if self.is_live and time.monotonic() >= self._next_refresh:
            self._next_refresh = time.monotonic() + _REFRESH_SECONDS
            now, height = rows(), self._live.console.size.height - _FRAME_LINES
            self._live.update(_render(most_important(now, height), now), refresh=True)


def most_important(rows: Sequence[LiveRow], most: int) -> list[LiveRow]:
    """Return at most ``most`` rows in order; running jobs are kept first, then failures."""

    def rank(row: LiveRow) -> int:
        return _LAST.get(row.status, int(row.status in _ENDED_BADLY))

    kept = {id(row) for row in sorted(rows, key=rank)[: max(most, 1)]}
    return [row for row in rows if id(row) in kept]


def _render(shown: Sequence[LiveRow], rows: Sequence[LiveRow]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in _COLUMNS:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for row in shown:
        # as text: an override may contain what rich reads as markup
        table.add_row(*(Text(cell) for cell in row.cells()))
    counts = Counter(row.status for row in rows)
    tally = f"{len(rows)} jobs: " + ", ".join(f"{n} {status}" for status, n in counts.items())
    hidden = f" ({len(rows) - len(shown)} not shown)" if len(shown) < len(rows) else ""
    return Group(table, Text(tally + hidden))
