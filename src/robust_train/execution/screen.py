"""Writing to our own stdout and stderr without ever waiting for whoever reads them.

A terminal under Ctrl-S, a dead ssh, ``| less``: what cannot be shown is kept for a while, then
dropped, and a line says so once the reader is back. Nothing is lost from an attempt's log.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import socket
import stat
import sys
import time
from collections.abc import Iterator
from typing import TextIO

_MOST_WAITING_BYTES = 1 << 20
_LAST_CHANCE_SECONDS = 2.0


class Screen:
    """One of our streams, written to without blocking.

    Args:
        descriptor: where to write.

    Attributes:
        poll_fd: becomes writable when more can be shown.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting = bytearray()
        self._dropped_bytes = 0
        self._target: tuple[int, int, int] | None = None
        self._is_gone = False
        self._is_socket = False
        self.poll_fd = descriptor
        self._open()

    def _open(self) -> None:
        """Open the descriptor's file anew if it is another one than before."""
        status = os.fstat(self._descriptor)
        target = (status.st_dev, status.st_ino, status.st_rdev)
        if target == self._target:
            return
        if self.poll_fd != self._descriptor:
            os.close(self.poll_fd)
        self._target, self._is_gone, self.poll_fd = target, False, self._descriptor
        self._is_socket = stat.S_ISSOCK(status.st_mode)
        if stat.S_ISFIFO(status.st_mode) or os.isatty(self._descriptor):
            # a flag on the descriptor itself would hold for the shell that shares it
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            with contextlib.suppress(OSError):
                self.poll_fd = os.open(f"/proc/self/fd/{self._descriptor}", flags)

    @property
    def is_waiting(self) -> bool:
        """Whether something is left to be shown."""
        return bool(self._waiting)

    def write(self, data: bytes) -> None:
        """Show ``data`` now, later or never."""
        try:
            self._open()
        except OSError:  # closed in this process
            return
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
            except BlockingIOError:
                return
            except OSError:  # closed by its reader, as by ``| head``
                self._is_gone = True
                self._waiting.clear()
                return
            del self._waiting[:written]
            if not self._waiting and self._dropped_bytes:
                kib = -(-self._dropped_bytes // 1024)
                self._dropped_bytes = 0
                self._waiting += (
                    f"\n[{kib} KiB of output were not shown, for nobody read them; "
                    "attempt-*.log in the run folder has them]\n"
                ).encode()

    def finish(self, timeout_seconds: float = _LAST_CHANCE_SECONDS) -> None:
        """Show the rest, as long as somebody reads."""
        poll = select.poll()
        poll.register(self.poll_fd, select.POLLOUT)
        deadline = time.monotonic() + timeout_seconds
        while self._waiting and time.monotonic() < deadline:
            before = len(self._waiting)
            poll.poll(100)
            self.show()
            if len(self._waiting) != before:
                deadline = time.monotonic() + timeout_seconds

    def _write(self, data: bytes) -> int:
        if not self._is_socket:
            return os.write(self.poll_fd, data)
        copy = socket.socket(fileno=os.dup(self._descriptor))
        with copy:
            return copy.send(data, socket.MSG_DONTWAIT)


class _RawScreen(io.RawIOBase):
    def __init__(self, screen: Screen, descriptor: int) -> None:
        self._screen = screen
        self._number = descriptor

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def fileno(self) -> int:
        return self._number

    def write(self, data: object) -> int:
        content = bytes(data)  # type: ignore[call-overload]
        self._screen.write(content)
        return len(content)


_screens: dict[int, Screen] = {}


def screen_of(descriptor: int) -> Screen:
    """Return the one screen for a descriptor of this process."""
    if descriptor not in _screens:
        _screens[descriptor] = Screen(descriptor)
    return _screens[descriptor]


def waiting_screens() -> list[Screen]:
    """Return the screens with something left to show."""
    return [screen for screen in _screens.values() if screen.is_waiting]


@contextlib.contextmanager
def never_blocking_output() -> Iterator[None]:
    """Have this process's own prints and log lines go to screens, within the block."""
    old = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_unblocked(stream) for stream in old)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        sys.stdout, sys.stderr = old
        for screen in waiting_screens():
            screen.finish()


def _unblocked(stream: TextIO) -> TextIO:
    try:
        number = stream.fileno()
        stream.flush()
        raw = io.BufferedWriter(_RawScreen(screen_of(number), number))
        return io.TextIOWrapper(
            raw, stream.encoding, stream.errors, line_buffering=True, write_through=True
        )
    except (AttributeError, OSError, ValueError):
        return stream
