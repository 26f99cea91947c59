"""The last lines of a terminal: what is still being written, and below it one live status.

All that is finished scrolls above. Attempts may draw progress bars of their own; these stay whole,
for only whole lines scroll, and what is rewritten is part of the area.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from robust_train.host.screen import Screen, never_blocking_output, screen_of

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

REFRESH_SECONDS = 0.2
_MOST_ROWS = 10
_LONGEST_ROW = 1 << 16
_WIDEST = 8  # colours take room as well
_CODE = re.compile(
    r"(\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]|[\r\n\b])"
)
_UNFINISHED_CODE = re.compile(
    r"\x1b(?:[ -/]{0,9}|\[[ -?]{0,99}|\][^\x07\x1b]{0,999}\x1b?)\Z"
)


class Rows:
    """The end of what one writer has written: the lines that it may still rewrite. Progress bars
    move the cursor up to the bars above; as many lines as they ever moved are kept back, and one
    from the first bar on."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._rows = [""]
        self._row = 0
        self._kept = 0
        self._rewrites = False
        self._style = ""

    @property
    def rows(self) -> list[str]:
        """The lines as they are now, without the empty ones at their end."""
        rows = list(self._rows)
        while rows and not rows[-1].strip():
            rows.pop()
        return rows

    def take(self, data: bytes) -> list[str]:
        """Handle what was written; return the lines that are finished by it."""
        text = self._rest + self._decoder.decode(data)
        self._rest = ""
        if (cut := _UNFINISHED_CODE.search(text)) is not None:
            text, self._rest = text[: cut.start()], cut.group()
        finished: list[str] = []
        for part in filter(None, _CODE.split(text)):
            if part == "\n" or len(self._rows[self._row]) > _LONGEST_ROW:
                self._next_row(finished)
            if part == "\r":
                self._rewrites = True
            elif part == "\b":
                self._rows[self._row] = self._rows[self._row][:-1]
            elif part.startswith("\x1b"):
                self._obey(part)
            elif part != "\n":
                before = self._rows[self._row]
                if self._rewrites:
                    before, self._kept = "", max(self._kept, 1)
                self._rows[self._row] = before + self._style + part
                self._rewrites, self._style = False, ""
        return finished

    def _next_row(self, finished: list[str]) -> None:
        self._rows[self._row] += self._style
        self._rewrites, self._style = False, ""
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append("")
        while len(self._rows) - 1 > self._kept:
            finished.append(self._rows.pop(0))
            self._row -= 1

    def _obey(self, code: str) -> None:
        """Follow a control sequence: colours are kept, the cursor moves up and down."""
        if code.endswith("m"):
            self._style += code
        elif code.endswith("K") and (self._rewrites or code == "\x1b[2K"):
            self._rows[self._row] = ""
        elif (code.endswith(("A", "B")) and code[2:-1].isdecimal()) or code in (
            "\x1b[A",
            "\x1b[B",
        ):
            steps = int(code[2:-1] or 1)
            if code.endswith("A"):
                self._kept = min(max(self._kept, steps), _MOST_ROWS)
                self._row = max(self._row - steps, 0)
            else:
                self._row = min(self._row + steps, len(self._rows) - 1)


class _Finished:
    """Lines that go to the terminal as they are."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        from rich.segment import Segment

        yield Segment("".join(f"{line}\n" for line in self._lines))


class _Writer(io.StringIO):
    """What rich writes to: a screen, which never waits for its reader."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen
        self.is_muted = False

    def write(self, text: str) -> int:
        if not self.is_muted:
            self._screen.write(text.encode(errors="replace"))
        return len(text)

    def isatty(self) -> bool:
        return True


class LiveArea:
    """Keeps a status below all that is written to a terminal; a context manager. Nothing is drawn
    while no one reads, or while another job of the shell's has the terminal."""

    def __init__(self, descriptor: int) -> None:
        from rich.console import Console
        from rich.live import Live

        self._descriptor = descriptor
        self._screen = screen_of(descriptor)
        self._writer = _Writer(self._screen)
        self._console = console = Console(file=self._writer, highlight=False)
        # it stays visible: who is killed cannot bring it back
        console.show_cursor = lambda show=True: False  # type: ignore[method-assign]
        self._live = Live(
            self,
            console=console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
            vertical_overflow="crop",
        )
        self._writers: dict[object, Rows] = {}
        self._status: Sequence[Text] = ()
        self._next_refresh = 0.0
        self._rows: list[Text] = []

    @property
    def size(self) -> tuple[int, int]:
        """The terminal's columns and lines now."""
        from rich.console import ConsoleDimensions

        columns = lines = 0
        with contextlib.suppress(OSError):  # hung up
            columns, lines = os.get_terminal_size(self._descriptor)
        self._console.size = ConsoleDimensions(columns or 80, lines or 24)
        return self._console.width, self._console.height

    def __enter__(self) -> LiveArea:
        self._live.start()
        self._screen.area = self
        return self

    def __exit__(self, *error: object) -> None:
        self._status = ()
        left = [row for writer in self._writers.values() for row in writer.rows]
        self._writers.clear()
        self._draw(left)
        self._screen.area = None
        self._writer.is_muted = not self._is_in_front()
        self._live.stop()

    def show(self, status: Sequence[Text]) -> None:
        """Show these lines from now on."""
        self._status = status
        self._screen.show()
        if not self._screen.is_behind and self._is_in_front():
            self._draw()

    def take(self, data: bytes, source: object = None) -> None:
        """Handle what ``source`` writes: finished lines scroll above, the rest is rewritten."""
        finished = self._writers.setdefault(source, Rows()).take(data)
        if finished or (
            time.monotonic() >= self._next_refresh and not self._screen.is_behind
        ):
            self._draw(finished)

    def settle(self, source: object) -> None:
        """Treat what ``source`` has written as finished."""
        if (writer := self._writers.pop(source, None)) is not None:
            self._draw(writer.rows)

    def _draw(self, finished: Sequence[str] = ()) -> None:
        from rich.text import Text

        self._next_refresh = time.monotonic() + REFRESH_SECONDS
        if not self._is_in_front():  # the last lines are the shell's now
            self._rows, self._writer.is_muted = [], True
            self._console.print()
            self._writer.is_muted = False
            self._screen.write(
                "".join(f"{line}\n" for line in finished).encode(errors="replace")
            )
            return
        columns, _ = self.size
        # a terminal that became narrower has broken the lines that did not fit
        if more := sum(max(row.cell_len - 1, 0) // columns for row in self._rows):
            self._screen.write(f"\x1b[{more}A\r\x1b[J".encode())
        ends = (row for writer in self._writers.values() for row in writer.rows)
        rows = [Text.from_ansi(row[: _WIDEST * columns]) for row in ends]
        self._rows = [*rows, *self._status]
        for row in self._rows:
            row.no_wrap = True
            row.truncate(columns)
        self._console.print(_Finished(finished), end="", crop=False)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        yield from self._rows

    def _is_in_front(self) -> bool:
        """Return whether the shell has not put this process into the background."""
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:  # not the terminal that controls us, so there is no other job
            return True


@contextlib.contextmanager
def live_area() -> Iterator[LiveArea | None]:
    """Yield an area on the terminal that this process prints and logs to; None without one."""
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # a terminal of an IDE's own making
        yield None
        return
    with never_blocking_output(), LiveArea(descriptor) as area:
        yield area
