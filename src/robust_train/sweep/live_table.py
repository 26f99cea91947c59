"""What a running sweep shows: its jobs below the log lines on a terminal."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from robust_train.folder.state import RunState
from robust_train.host.job_logging import shorten_lines_on_terminals
from robust_train.host.screen import LiveArea, live_area
from robust_train.readable import aligned, shortened

_REFRESH_SECONDS = 0.5
_COLUMNS = ("job", "overrides", "status", "attempt", "device", "batch", "step")
_LAST = {"pending": 2, "completed": 3}
_ENDED_BADLY = ("failed", "no_device", "interrupted", "refused", "died")
_OTHER_LINES = 3  # the names of the columns, the tally and the line with the cursor
_LEAST_COLUMNS = 16  # of the overrides


@dataclass(frozen=True)
class LiveRow:
    """One job: its overrides that differ, its status, and ``state.json`` of its current launch."""

    job: int
    overrides: str
    status: str
    state: RunState | None = None

    def cells(self) -> tuple[str, ...]:
        """Return the texts of the columns."""
        shown: list[object] = [
            self.job,
            self.overrides,
            self.status,
            None,
            None,
            None,
            None,
        ]
        attempt = None if self.state is None else self.state.attempt
        if attempt is not None:
            of = f"/{attempt.total_steps}" if attempt.total_steps else ""
            step = None if attempt.step is None else f"{attempt.step}{of}"
            size = attempt.spec.batch_size if attempt.spec.has_batch else None
            shown[3:] = attempt.number, attempt.spec.device, size, step
        return tuple("" if value is None else str(value) for value in shown)


class LiveTable:
    """Context manager that shows a sweep's jobs, on a terminal; elsewhere nothing."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._area: LiveArea | None = None
        self._next_refresh = 0.0

    def __enter__(self) -> LiveTable:
        shorten_lines_on_terminals()
        self._area = self._open.enter_context(live_area())
        return self

    def __exit__(self, *error: object) -> None:
        self._area = None
        self._open.close()

    def show(self, rows: Callable[[], Sequence[LiveRow]]) -> None:
        """Show the table as it is now, at most twice a second."""
        if self._area is not None and time.monotonic() >= self._next_refresh:
            self._next_refresh = time.monotonic() + _REFRESH_SECONDS
            from rich.text import Text

            table = table_lines(rows(), *self._area.size)
            self._area.show([Text(line, style="dim") for line in table])


def table_lines(rows: Sequence[LiveRow], columns: int, lines: int) -> list[str]:
    """Return the table of the jobs in at most ``lines`` lines of about ``columns`` characters."""
    shown = most_important(rows, lines - _OTHER_LINES)
    cells = [_COLUMNS, *(row.cells() for row in shown)]
    others = sum(
        max(len(row[n]) for row in cells) + 2 for n in range(len(_COLUMNS)) if n != 1
    )
    room = max(columns - others, _LEAST_COLUMNS)
    table = aligned([(job, shortened(own, room), *rest) for job, own, *rest in cells])
    counts = ", ".join(
        f"{n} {status}" for status, n in Counter(r.status for r in rows).items()
    )
    hidden = f" ({len(rows) - len(shown)} not shown)" if len(shown) < len(rows) else ""
    return [*table, f"{len(rows)} jobs: {counts}{hidden}"]


def most_important(rows: Sequence[LiveRow], most: int) -> list[LiveRow]:
    """Return at most ``most`` rows in order; running jobs are kept first, then failures."""

    def rank(row: LiveRow) -> int:
        return _LAST.get(row.status, int(row.status in _ENDED_BADLY))

    kept = {id(row) for row in sorted(rows, key=rank)[: max(most, 1)]}
    return [row for row in rows if id(row) in kept]
