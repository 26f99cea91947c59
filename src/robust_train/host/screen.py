"""Writing to our own stdout and stderr without waiting for whoever reads them, and a live status.

A terminal under Ctrl-S, a dead ssh, ``| less``: what cannot be shown is kept for a while, then
dropped, which a line reports once the reader is back. Nothing is lost from an attempt's log.
On a terminal a `LiveArea` shows a status below all output.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import select
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.text import Text

_MOST_WAITING_BYTES = 1 << 20
_PASSING = (errno.EAGAIN, errno.ENOSPC, errno.EDQUOT)
_LAST_CHANCE_SECONDS = 2.0
_TRUNCATED = (
    "[Output truncated: no one was reading. %d KiB are not shown; "
    "attempt-*.log in the run folder has them]\n"
)


class Screen:
    """The file behind a standard stream, written to without blocking."""

    def __init__(self, descriptor: int) -> None:
        self.area: LiveArea | None = None
        self._waiting = bytearray()
        self._dropped_bytes = 0
        self._is_gone = self._is_unread = False
        self._source: object = None  # who wrote last
        self._is_in_line = False  # whether that did not end its line
        mode = os.fstat(descriptor).st_mode
        self._is_socket = stat.S_ISSOCK(mode)
        self._fd = -1
        if stat.S_ISFIFO(mode) or os.isatty(descriptor):
            # a flag on the descriptor itself would hold for the shell that shares it
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            with contextlib.suppress(OSError):
                self._fd = os.open(f"/proc/self/fd/{descriptor}", flags)
        if self._fd < 0:
            self._fd = os.dup(descriptor)

    @property
    def is_behind(self) -> bool:
        """Whether output waits for its reader."""
        return bool(self._waiting)

    def write_line_of(self, source: object, data: bytes) -> None:
        """Show ``data``, after ending a line that the other writer (we or the trainer) left
        open."""
        is_others = (source is None) != (self._source is None)
        if is_others and self._is_in_line and not data.startswith((b"\n", b"\r\n")):
            data = b"\n" + data
        self._is_in_line = not data.endswith(b"\n")
        self._source = source
        self.write(data)

    def write(self, data: bytes) -> None:
        """Show ``data`` now, later or never."""
        room = _MOST_WAITING_BYTES - len(self._waiting)
        if self._is_gone or len(data) > room or self._dropped_bytes:
            self._dropped_bytes += len(data)
        else:
            self._waiting += data
        self.show()

    def show(self) -> None:
        """Write as much as is taken without waiting."""
        while self._waiting and not self._is_gone:
            try:
                written = self._write(bytes(self._waiting[:65536]))
            except OSError as error:
                if error.errno not in _PASSING:
                    # closed by its reader, as by ``| head``
                    self._is_gone = True
                    self._waiting.clear()
                return
            self._is_unread = False
            del self._waiting[:written]
            if not self._waiting and self._dropped_bytes:
                notice = _TRUNCATED % -(-self._dropped_bytes // 1024)
                self._dropped_bytes = 0
                self._waiting += f"\n{notice}".encode()

    def finish(self, timeout_seconds: float = _LAST_CHANCE_SECONDS) -> bool:
        """Show the rest, as long as someone reads, without waiting twice. Returns whether all is
        shown."""
        self.show()
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        deadline = time.monotonic() + timeout_seconds
        while self._waiting and not self._is_unread and time.monotonic() < deadline:
            before = len(self._waiting)
            poll.poll(100)
            self.show()
            if len(self._waiting) != before:
                deadline = time.monotonic() + timeout_seconds
            else:
                time.sleep(0.01)  # a full disk can be polled at once
        self._is_unread = bool(self._waiting)
        return not self._is_unread

    def close(self) -> None:
        """Release the descriptor."""
        os.close(self._fd)

    def _write(self, data: bytes) -> int:
        if not self._is_socket:
            return os.write(self._fd, data)
        with socket.socket(fileno=os.dup(self._fd)) as copy:
            return copy.send(data, socket.MSG_DONTWAIT)


_screens: dict[tuple[int, int, int], Screen] = {}
"""By the file that they write to: descriptors of one terminal share its screen."""


def screen_of(descriptor: int) -> Screen:
    """Return the screen for the file that is open under a descriptor now. Raises OSError if no file
    is open there."""
    status = os.fstat(descriptor)
    target = (status.st_dev, status.st_ino, status.st_rdev)
    if target not in _screens:
        _screens[target] = Screen(descriptor)
    return _screens[target]


def show(descriptor: int, data: bytes, source: object = None) -> None:
    """Write to a standard stream without waiting, or nothing if it is closed. ``source`` is the
    writer: output of another writer does not go into its unfinished line."""
    with contextlib.suppress(OSError):
        screen = screen_of(descriptor)
        if screen.area is None:
            screen.write_line_of(source, data)
        else:
            screen.area.write(data, source)


def settle(descriptor: int, source: object) -> None:
    """Let what ``source`` has left unfinished on a terminal scroll away."""
    with contextlib.suppress(OSError):
        area = screen_of(descriptor).area
        if area is not None:
            area.settle(source)


def show_waiting() -> None:
    """Write the pending output, if someone reads again."""
    for screen in _screens.values():
        screen.show()


def finish() -> None:
    """Show the rest of everything, as long as someone reads."""
    for target, screen in list(_screens.items()):
        if screen.finish() and screen.area is None:
            del _screens[target]
            screen.close()


# --- the status below ------------------------------------------------------------------------

_MOVES = re.compile(rb"\n|\x1b\[(\d*)([AB])")
_MOST_BELOW = 10
_LONGEST_LINE_BYTES = 1 << 14
_SAVE = b"\x1b7"
_RESTORE = b"\x1b8"
_ERASE = b"\r\x1b[J"
_AT_STOP = b"stopped by Ctrl-Z: training continues meanwhile; fg shows it again\r\n"
_ONE_DOWN = b"\x1bD"  # scrolls at the end of the screen, and keeps the column


class LiveArea:
    """Keeps a status below all output on a terminal. A context manager.

    The cursor stays where the output left it, so bars and colours are up to the terminal, and a
    killed launcher leaves no trace. Only two things are known of the output: the line with the
    cursor, and how many lines a program has moved up, as nested bars do. Nothing is drawn while no
    one reads, or while the shell has the terminal.
    """

    def __init__(self, descriptor: int) -> None:
        from rich.console import Console

        self._descriptor = descriptor
        self._screen = screen_of(descriptor)
        self._console = Console(file=io.StringIO(), force_terminal=True, highlight=False)
        self._status: list[bytes] = []
        self._is_drawn = self._clears_at_stop = False
        self._source: object = None  # who wrote the line with the cursor
        self._line = b""  # its last state
        self._below = 0  # lines of the output that are below the cursor

    @property
    def size(self) -> tuple[int, int]:
        """The terminal's columns and lines now."""
        columns = lines = 0
        with contextlib.suppress(OSError):  # hung up
            columns, lines = os.get_terminal_size(self._descriptor)
        return columns or 80, lines or 24

    def __enter__(self) -> LiveArea:
        self._screen.area = self
        is_main = threading.current_thread() is threading.main_thread()
        # a program that has a handler of its own for Ctrl-Z keeps it
        if is_main and signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
            self._clears_at_stop = True
            signal.signal(signal.SIGTSTP, self._on_stop)
        return self

    def _on_stop(self, signum: int, frame: FrameType | None) -> None:
        """Clear the status and stop this process, as Ctrl-Z does. The next status is shown
        again."""
        self._screen.write(self._erase() + self._next_line() + _AT_STOP)
        self._is_drawn = False
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)  # returns once the process is continued
        signal.signal(signum, self._on_stop)

    def __exit__(self, *error: object) -> None:
        if self._clears_at_stop:
            self._clears_at_stop = False
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        self._status = []
        self.settle(self._source)
        self._screen.area = None

    def show(self, status: Sequence[Text]) -> None:
        """Show these lines from now on."""
        columns, _ = self.size
        with self._console.capture() as captured:
            for line in status:
                self._console.print(line, no_wrap=True, overflow="crop", width=columns)
        self._status = captured.get().encode(errors="replace").splitlines()
        self._screen.show()
        self._screen.write(self._erase() + self._draw())

    def write(self, data: bytes, source: object = None) -> None:
        """Write what ``source`` prints, above the status."""
        erase = self._erase()
        if source is not self._source and (self._line or self._below):
            if data.endswith(b"\n") and self._is_one_row():
                # whole lines go above one that is still being rewritten
                erase = erase + b"\r\x1b[K"
                data = data + self._line
                source = self._source
            elif self._below or not data.startswith(b"\r"):
                erase += self._next_line()
        self._source = source
        self._follow(data)
        self._screen.write(erase + data + self._draw())

    def settle(self, source: object) -> None:
        """Treat what ``source`` has written as finished."""
        if source is self._source:
            erase = self._erase() + self._next_line()
            self._screen.write(erase + self._draw())

    def _follow(self, data: bytes) -> None:
        """Follow the cursor through some output."""
        line = (self._line + data).rpartition(b"\n")[2]
        rewritten = line.rstrip(b"\r").rfind(b"\r")
        self._line = line[max(rewritten, 0) :][-_LONGEST_LINE_BYTES:]
        for move in _MOVES.finditer(data):
            lines = int(move[1] or 1)
            self._below += lines if move[2] == b"A" else -lines
            self._below = min(max(self._below, 0), _MOST_BELOW)

    def _is_one_row(self) -> bool:
        """Return whether the line with the cursor is the last and fits on a row of the terminal."""
        from rich.text import Text

        line = Text.from_ansi(self._line.decode(errors="replace").replace("\r", ""))
        return not self._below and line.cell_len <= self.size[0]

    def _next_line(self) -> bytes:
        """Return how the cursor gets below the output."""
        down = self._down()
        ends = b"\r\n" if self._below or self._line.strip() else b"\r"
        self._line = b""
        self._below = 0
        return down + ends

    def _down(self) -> bytes:
        return b"\x1b[%dB" % self._below if self._below else b""

    def _erase(self) -> bytes:
        """Return the sequence that erases the status and restores the cursor."""
        if not self._is_drawn or not self._is_in_front():
            return b""
        if self._is_one_row():  # wherever the cursor is: people type
            return _ERASE + self._line
        return _SAVE + b"\x1b[%dB" % (self._below + 1) + _ERASE + _RESTORE

    def _draw(self) -> bytes:
        """Return how the status comes below the cursor, which stays."""
        self._is_drawn = not self._screen.is_behind and self._is_in_front()
        status = self._status[: max(self.size[1] - 1 - self._below, 0)]
        if not self._is_drawn or not status:
            return b""
        lines = self._below + len(status)
        room = _ONE_DOWN * lines + b"\x1b[%dA" % lines + _SAVE
        down = self._down()
        rows = b"".join(b"\r\n\x1b[m" + line for line in status)
        return room + down + rows + _RESTORE

    def _is_in_front(self) -> bool:
        """Return whether the shell has not put this process into the background."""
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        # not the terminal that controls us, so there is no other job
        except OSError:
            return True


@contextlib.contextmanager
def live_area() -> Iterator[LiveArea | None]:
    """Yield an area on the terminal that this process prints and logs to, or None without a
    terminal."""
    # none: a terminal of an IDE's own making
    descriptor = descriptor_of(sys.stdout)
    is_dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown")
    if descriptor < 0 or is_dumb or not os.isatty(descriptor):
        yield None
        return
    with never_blocking_output(), LiveArea(descriptor) as area:
        yield area


# --- this process's own streams --------------------------------------------------------------


class _RawScreen(io.RawIOBase):
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: object) -> int:
        content = bytes(data)  # type: ignore[call-overload]
        show(self._descriptor, content)
        return len(content)


@contextlib.contextmanager
def never_blocking_output() -> Iterator[None]:
    """Send this process's own prints and log lines to screens, within the block."""
    open_closed_streams()
    old = sys.stdout, sys.stderr
    new = [_unblocked(stream) for stream in old]
    sys.stdout, sys.stderr = new
    moved = []
    for handler in log_handlers():
        for was, now in zip(old, (sys.stdout, sys.stderr), strict=True):
            if was is not now and descriptor_of(handler.stream) == was.fileno():
                moved.append((handler, handler.setStream(now)))
                break
    try:
        yield
    finally:
        for handler, before in moved:
            if before is not None:
                handler.setStream(before)
        flush_output()
        sys.stdout, sys.stderr = old
        finish()


def log_handlers() -> list[logging.StreamHandler[TextIO]]:
    """Return what writes the launcher's log lines to streams."""
    handlers = logging.getLogger().handlers + logging.getLogger("robust_train").handlers
    return [handler for handler in handlers if isinstance(handler, logging.StreamHandler)]


def flush_output() -> None:
    """Write out what this process has printed, as far as that is possible."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def open_closed_streams() -> None:
    """Open the standard streams that are closed (``>&-``). Otherwise a lock file would take their
    place."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def descriptor_of(stream: TextIO) -> int:
    """Return the descriptor that a stream writes to, or -1 for none. A notebook's stream has the
    number of the terminal in which the notebook was started."""
    with contextlib.suppress(OSError, ValueError):
        if isinstance(stream, io.TextIOWrapper):
            return stream.fileno()
    return -1


def _unblocked(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper) or descriptor_of(stream) < 0:
        return stream
    flush_output()
    return io.TextIOWrapper(  # type: ignore[type-var]
        _RawScreen(stream.fileno()),
        stream.encoding,
        "replace" if stream.errors == "strict" else stream.errors,
        line_buffering=True,
        write_through=True,
    )
