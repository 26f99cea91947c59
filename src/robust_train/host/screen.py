"""Writes to a terminal, pipe or file without waiting for whoever reads it.

The launcher shows the output of attempts, and its own, on the screen behind its stdout and stderr.
If no one reads that output, for example under Ctrl-S, in ``| less`` or over a dead ssh connection,
the launcher must not wait. Up to 1 MiB is kept, and the rest is dropped and reported in a line once
someone reads again. Nothing is lost from an attempt's log file.

``children/attempt_output.py`` shows the output of attempts by `show`. ``host/streams.py`` sends the
launcher's own output there. On a terminal, a `LiveArea` may show a status below all output.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import stat
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from robust_train.host.live_area import LiveArea

_MOST_WAITING_BYTES = 1 << 20
# Errors after which a later write may succeed. Any other error means that the reader is gone.
_PASSING = (errno.EAGAIN, errno.ENOSPC, errno.EDQUOT)
_LAST_CHANCE_SECONDS = 2.0
_TRUNCATED = (
    "[Output truncated: no one was reading. %d KiB are not shown; "
    "attempt-*.log in the run folder has them]\n"
)


class Screen:
    """The file behind a standard stream, written to without blocking.

    Attributes:
        area: the live status below the output, if there is one.
    """

    def __init__(self, descriptor: int) -> None:
        self.area: LiveArea | None = None
        self._waiting = bytearray()
        self._dropped_bytes = 0
        self._is_gone = False  # the reader has closed the file
        self._is_unread = False  # no one read during the last `finish`
        self._last_source: object = None  # the writer of the last output
        self._is_in_line = False  # the last output did not end its line
        mode = os.fstat(descriptor).st_mode
        self._is_socket = stat.S_ISSOCK(mode)
        self._fd = _open_without_blocking(descriptor, mode)

    @property
    def is_behind(self) -> bool:
        """Whether output waits for its reader."""
        return bool(self._waiting)

    def write_line_of(self, source: object, data: bytes) -> None:
        """Show ``data`` of a writer: the output of an attempt, or None for this process.

        If the other of the two left its line unfinished, ``data`` starts on a new line.
        """
        is_other_writer = (source is None) != (self._last_source is None)
        if is_other_writer and self._is_in_line and not data.startswith((b"\n", b"\r\n")):
            data = b"\n" + data
        self._is_in_line = not data.endswith(b"\n")
        self._last_source = source
        self.write(data)

    def write(self, data: bytes) -> None:
        """Show ``data`` now, or later if no one reads, or never if too much is waiting."""
        room = _MOST_WAITING_BYTES - len(self._waiting)
        if self._is_gone or len(data) > room or self._dropped_bytes:
            self._dropped_bytes += len(data)
        else:
            self._waiting += data
        self.show_waiting()

    def show_waiting(self) -> None:
        """Write as much of the waiting output as the file takes without blocking."""
        while self._waiting and not self._is_gone:
            try:
                written = self._write(bytes(self._waiting[:65536]))
            except OSError as error:
                if error.errno not in _PASSING:
                    # For example, ``| head`` closes the pipe.
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
        """Show the waiting output as long as someone reads it, and return whether all is shown. If
        no one read during an earlier call, do not wait again."""
        self.show_waiting()
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        deadline = time.monotonic() + timeout_seconds
        while self._waiting and not self._is_unread and time.monotonic() < deadline:
            before = len(self._waiting)
            poll.poll(100)
            self.show_waiting()
            if len(self._waiting) != before:
                deadline = time.monotonic() + timeout_seconds
            else:
                # A file on a full disk is always ready, so poll() did not wait.
                time.sleep(0.01)
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


def _open_without_blocking(descriptor: int, mode: int) -> int:
    """Return a descriptor for the same file whose writes do not block, if possible. A flag on
    ``descriptor`` itself would also change it for the shell, which shares it."""
    if stat.S_ISFIFO(mode) or os.isatty(descriptor):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            return os.open(f"/proc/self/fd/{descriptor}", flags)
    return os.dup(descriptor)


# Screens by the device and inode of their file: all descriptors of a terminal share its screen.
_screens: dict[tuple[int, int, int], Screen] = {}


def screen_of(descriptor: int) -> Screen:
    """Return the screen for the file that is open under a descriptor now.

    Raises:
        OSError: the descriptor is closed.
    """
    status = os.fstat(descriptor)
    target = (status.st_dev, status.st_ino, status.st_rdev)
    if target not in _screens:
        _screens[target] = Screen(descriptor)
    return _screens[target]


def show(descriptor: int, data: bytes, source: object = None) -> None:
    """Write to a standard stream without waiting. Do nothing if the stream is closed.

    ``source`` is the writer: the output of an attempt, or None for this process. Output of one does
    not go into an unfinished line of the other.
    """
    with contextlib.suppress(OSError):
        screen = screen_of(descriptor)
        if screen.area is None:
            screen.write_line_of(source, data)
        else:
            screen.area.write(data, source)


def end_line(descriptor: int, source: object) -> None:
    """End the unfinished line of ``source`` on a terminal with a live status, so that it scrolls
    away."""
    with contextlib.suppress(OSError):
        area = screen_of(descriptor).area
        if area is not None:
            area.end_line(source)


def show_waiting() -> None:
    """Write the waiting output of all screens, if someone reads again."""
    for screen in _screens.values():
        screen.show_waiting()


def finish() -> None:
    """Show the waiting output of all screens, as long as someone reads it."""
    for target, screen in list(_screens.items()):
        if screen.finish() and screen.area is None:
            del _screens[target]
            screen.close()
