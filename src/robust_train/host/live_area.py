"""Shows a live status below all output of a terminal, next to the progress bars of programs.

``report/status.py`` shows the status of a job or a sweep in the launcher, and of a job that runs
elsewhere in the ``attach`` command.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from robust_train.host.screen import screen_of
from robust_train.host.streams import descriptor_of, never_blocking_output

if TYPE_CHECKING:
    from rich.text import Text

# Moves of the cursor in a program's output: a line feed, or up (A) or down (B) by some lines.
_MOVES = re.compile(rb"\n|\x1b\[(\d*)([AB])")
_MOST_BELOW = 10
_LONGEST_LINE_BYTES = 1 << 14
# Escape sequences of terminals.
_SAVE_CURSOR = b"\x1b7"
_RESTORE_CURSOR = b"\x1b8"
_ERASE_BELOW = b"\r\x1b[J"  # from the start of the cursor's line to the end of the screen
_ERASE_LINE = b"\r\x1b[K"
_RESET_COLOURS = b"\x1b[m"
_ONE_DOWN = b"\x1bD"  # scrolls at the end of the screen, and keeps the column
_AT_STOP = b"stopped by Ctrl-Z: training continues in the meantime; fg shows it again\r\n"


class LiveArea:
    """Keeps a status below all output on a terminal. A context manager.

    Before any output, the status is erased, and after the output it is drawn again below. In
    between, the cursor stays where the output left it. So the terminal itself handles bars and
    colours, and a killed launcher leaves no trace.

    To find the rows below the output, the area follows two things: the text of the line with the
    cursor, and the number of lines that a program has moved the cursor up, as nested bars do.
    Nothing is drawn while no one reads, or while this process is in the background of its shell.
    """

    def __init__(self, descriptor: int) -> None:
        from rich.console import Console

        self._descriptor = descriptor
        self._screen = screen_of(descriptor)
        self._console = Console(file=io.StringIO(), force_terminal=True, highlight=False)
        self._status: list[bytes] = []
        self._is_drawn = False
        self._handles_stop = False  # Ctrl-Z clears the status
        self._source: object = None  # the writer of the line with the cursor
        self._line = b""  # what this line shows
        self._below = 0  # lines of the output that are below the cursor

    @property
    def size(self) -> tuple[int, int]:
        """The terminal's columns and lines now."""
        columns = lines = 0
        # The terminal may be closed.
        with contextlib.suppress(OSError):
            columns, lines = os.get_terminal_size(self._descriptor)
        return columns or 80, lines or 24

    def __enter__(self) -> LiveArea:
        self._screen.area = self
        is_main = threading.current_thread() is threading.main_thread()
        # A program's own handler for Ctrl-Z stays.
        if is_main and signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
            self._handles_stop = True
            signal.signal(signal.SIGTSTP, self._on_stop)
        return self

    def _on_stop(self, signum: int, frame: FrameType | None) -> None:
        """Clear the status and stop this process, as Ctrl-Z does. After ``fg``, the next status is
        drawn again."""
        self._screen.write(self._erase() + self._next_line() + _AT_STOP)
        self._is_drawn = False
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)  # returns once the process is continued
        signal.signal(signum, self._on_stop)

    def __exit__(self, *error: object) -> None:
        if self._handles_stop:
            self._handles_stop = False
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        self._status = []
        self.end_line(self._source)
        self._screen.area = None

    def show(self, status: Sequence[Text]) -> None:
        """Show these lines from now on."""
        columns, _ = self.size
        with self._console.capture() as captured:
            for line in status:
                self._console.print(line, no_wrap=True, overflow="crop", width=columns)
        self._status = captured.get().encode(errors="replace").splitlines()
        self._screen.show_waiting()
        self._screen.write(self._erase() + self._draw())

    def write(self, data: bytes, source: object = None) -> None:
        """Write the output of ``source`` above the status."""
        erase = self._erase()
        if source is not self._source and (self._line or self._below):
            if data.endswith(b"\n") and self._is_one_row():
                # Whole lines go above a bar that is still being rewritten.
                erase += _ERASE_LINE
                data += self._line
                source = self._source
            elif self._below or not data.startswith(b"\r"):
                erase += self._next_line()
        self._source = source
        self._follow(data)
        self._screen.write(erase + data + self._draw())

    def end_line(self, source: object) -> None:
        """End the line with the cursor if ``source`` wrote it."""
        if source is self._source:
            erase = self._erase() + self._next_line()
            self._screen.write(erase + self._draw())

    def _follow(self, data: bytes) -> None:
        """Follow the cursor through some output."""
        line = (self._line + data).rpartition(b"\n")[2]
        # Only the text after the last carriage return is still on the screen.
        rewritten = line.rstrip(b"\r").rfind(b"\r")
        self._line = line[max(rewritten, 0) :][-_LONGEST_LINE_BYTES:]
        for move in _MOVES.finditer(data):
            lines = int(move[1] or 1)
            if move[2] == b"A":
                self._below = min(self._below + lines, _MOST_BELOW)
            else:
                self._below = max(self._below - lines, 0)

    def _is_one_row(self) -> bool:
        """Return whether the line with the cursor is the last line and fits on a row of the
        terminal."""
        from rich.text import Text

        line = Text.from_ansi(self._line.decode(errors="replace").replace("\r", ""))
        return not self._below and line.cell_len <= self.size[0]

    def _next_line(self) -> bytes:
        """Return the sequence that moves the cursor to a new line below the output."""
        down = self._move_down()
        is_empty = not self._below and not self._line.strip()
        end = b"\r" if is_empty else b"\r\n"
        self._line = b""
        self._below = 0
        return down + end

    def _move_down(self) -> bytes:
        """Return the sequence that moves the cursor to the last line of the output."""
        return b"\x1b[%dB" % self._below if self._below else b""

    def _erase(self) -> bytes:
        """Return the sequence that erases the status and restores the cursor."""
        if not self._is_drawn or not self._is_in_foreground():
            return b""
        if self._is_one_row():
            # People may have typed something in this row, so it is written again.
            return _ERASE_BELOW + self._line
        below_output = b"\x1b[%dB" % (self._below + 1)
        return _SAVE_CURSOR + below_output + _ERASE_BELOW + _RESTORE_CURSOR

    def _draw(self) -> bytes:
        """Return the sequence that draws the status below the output and restores the cursor."""
        self._is_drawn = not self._screen.is_behind and self._is_in_foreground()
        _, terminal_lines = self.size
        status = self._status[: max(terminal_lines - 1 - self._below, 0)]
        if not self._is_drawn or not status:
            return b""
        # Moving down first scrolls the output up if there is no room below it.
        lines = self._below + len(status)
        make_room = _ONE_DOWN * lines + b"\x1b[%dA" % lines + _SAVE_CURSOR
        rows = b"".join(b"\r\n" + _RESET_COLOURS + line for line in status)
        return make_room + self._move_down() + rows + _RESTORE_CURSOR

    def _is_in_foreground(self) -> bool:
        """Return whether this process is in the foreground of its shell."""
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:
            # Not our controlling terminal, so no shell there can put this process aside.
            return True


@contextlib.contextmanager
def live_area() -> Iterator[LiveArea | None]:
    """Yield a `LiveArea` on the terminal that this process prints and logs to, or None if its
    output is not a terminal or cannot move the cursor."""
    # An IDE that replaces sys.stdout has no descriptor.
    descriptor = descriptor_of(sys.stdout)
    is_dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown")
    if descriptor < 0 or is_dumb or not os.isatty(descriptor):
        yield None
        return
    with never_blocking_output(), LiveArea(descriptor) as area:
        yield area
