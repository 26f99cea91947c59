"""What a running sweep shows: a live table on a terminal, one line an event elsewhere."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from robust_train.sweep.progress import Progress

if TYPE_CHECKING:
    from rich.console import RenderableType

log = logging.getLogger("robust_train")

_REFRESH_SECONDS = 0.5
_COLUMNS = ("job", "overrides", "status", "attempt", "device", "batch", "step")
_ACTIVE = ("running", "waiting", "starting")
_FRAME_LINES = 7  # the table's own lines, the tally and the line the cursor stands in


@dataclass(frozen=True)
class LiveRow:
    """One job in the live table."""

    job: int
    overrides: str
    progress: Progress


class LiveTable:
    """Shows how a sweep goes; a context manager.

    Args:
        stream: where the terminal may be; standard error by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._next_refresh = 0.0
        self.is_live = self._stream.isatty() and os.environ.get("TERM") != "dumb"

    def __enter__(self) -> LiveTable:
        if self.is_live:
            from rich.console import Console
            from rich.live import Live

            # no thread that refreshes: the launcher forks its jobs
            self._live = Live(
                console=Console(file=self._stream),
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
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
            now, room = rows(), self._live.console.size.height - _FRAME_LINES
            self._live.update(_render(most_telling(now, room), now), refresh=True)


def most_telling(rows: Sequence[LiveRow], room: int) -> list[LiveRow]:
    """At most ``room`` rows, in order: those that run, then failures, then the rest."""

    def rank(row: LiveRow) -> int:
        status = row.progress.status
        if status in _ACTIVE:
            return 0
        return {"pending": 2, "completed": 3}.get(status, 1)

    kept = {id(row) for row in sorted(rows, key=rank)[: max(room, 1)]}
    return [row for row in rows if id(row) in kept]


def tally(rows: Sequence[LiveRow]) -> str:
    """One line: how many jobs are how far."""
    counts = Counter(row.progress.status for row in rows)
    return f"{len(rows)} jobs: " + ", ".join(f"{n} {status}" for status, n in counts.items())


def _render(shown: Sequence[LiveRow], rows: Sequence[LiveRow]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in _COLUMNS:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for row in shown:
        progress = row.progress
        step = "" if progress.step is None else str(progress.step)
        if step and progress.total_steps:
            step += f"/{progress.total_steps}"
        cells = (
            str(row.job),
            row.overrides,
            progress.status,
            _shown(progress.attempt),
            _shown(progress.device),
            _shown(progress.batch_size),
            step,
        )
        # as text: an override may contain what rich reads as markup
        table.add_row(*(Text(cell) for cell in cells))
    hidden = f" ({len(rows) - len(shown)} not shown)" if len(shown) < len(rows) else ""
    return Group(table, Text(tally(rows) + hidden))


def _shown(value: object) -> str:
    return "" if value is None else str(value)
