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

from robust_train.runfolder.state import RunState

if TYPE_CHECKING:
    from rich.console import RenderableType

log = logging.getLogger("robust_train")

_REFRESH_SECONDS = 0.5
_COLUMNS = ("job", "overrides", "status", "attempt", "device", "batch", "step")
_LAST = {"pending": 2, "completed": 3}
_ENDED_BADLY = ("failed", "no_device", "interrupted", "refused", "died")
_FRAME_LINES = 7  # the table's own lines, the tally and the line with the cursor


@dataclass(frozen=True)
class LiveRow:
    """One job in the live table.

    Attributes:
        job: its number.
        overrides: those in which it differs from the others.
        status: ``pending``, ``starting``, a state of ``state.json``, or how it ended.
        state: of its current launch, None before the first.
    """

    job: int
    overrides: str
    status: str
    state: RunState | None = None

    def cells(self) -> tuple[str, ...]:
        """Return the texts of the columns."""
        state = self.state
        if state is None:
            return str(self.job), self.overrides, self.status, "", "", "", ""
        step = _text(state.step)
        if step and state.total_steps:
            step += f"/{state.total_steps}"
        shown = (_text(value) for value in (state.attempt, state.device, state.batch_size))
        return str(self.job), self.overrides, self.status, *shown, step


class LiveTable:
    """Shows the progress of a sweep; a context manager.

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
            now, height = rows(), self._live.console.size.height - _FRAME_LINES
            self._live.update(_render(most_important(now, height), now), refresh=True)


def most_important(rows: Sequence[LiveRow], most: int) -> list[LiveRow]:
    """Return at most ``most`` rows, in order: running ones first, then failures, then the rest."""

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


def _text(value: object) -> str:
    return "" if value is None else str(value)
