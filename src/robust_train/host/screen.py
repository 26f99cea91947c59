"""Writing to our own stdout and stderr without ever waiting for whoever reads them.

A terminal under Ctrl-S, a dead ssh, ``| less``: what cannot be shown is kept for a while, then
dropped, which a line reports once the reader is back. Nothing is lost from an attempt's log.
On a terminal an :class:`Area` may hold the last lines.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import select
import socket
import stat
import sys
import time
from collections.abc import Iterator
from typing import Protocol, TextIO

_MOST_WAITING_BYTES = 1 << 20
_LAST_CHANCE_SECONDS = 2.0


class Area(Protocol):
    """What holds the last lines of a terminal: a live area."""

    def take(self, data: bytes, source: object = None) -> None:
        """Handle what ``source`` writes."""

    def settle(self, source: object) -> None:
        """Take what ``source`` has written for finished."""


class Screen:
    """One of our streams, written to without blocking.

    Args:
        descriptor: where to write; another file may be opened under its number later.
    """

    def __init__(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        self.target = (status.st_dev, status.st_ino, status.st_rdev)
        self.area: Area | None = None  # what is shown below all output; None: nothing
        self._waiting = bytearray()
        self._dropped_bytes = 0
        self._is_gone = self._is_unread = False
        self._is_socket = stat.S_ISSOCK(status.st_mode)
        self._own_fd = os.dup(descriptor)
        if stat.S_ISFIFO(status.st_mode) or os.isatty(descriptor):
            # a flag on the descriptor itself would hold for the shell that shares it
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            with contextlib.suppress(OSError):
                copy, self._own_fd = (
                    self._own_fd,
                    os.open(f"/proc/self/fd/{descriptor}", flags),
                )
                os.close(copy)

    @property
    def is_behind(self) -> bool:
        """Whether output waits for its reader."""
        return bool(self._waiting)

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
                if error.errno not in (errno.EAGAIN, errno.ENOSPC, errno.EDQUOT):
                    self._is_gone = True  # closed by its reader, as by ``| head``
                    self._waiting.clear()
                return
            self._is_unread = False
            del self._waiting[:written]
            if not self._waiting and self._dropped_bytes:
                kib = -(-self._dropped_bytes // 1024)
                self._dropped_bytes = 0
                notice = (
                    f"[Output truncated: no one was reading. {kib} KiB are not shown; "
                    "attempt-*.log in the run folder has them]\n"
                )
                if self.area is None:
                    self._waiting += f"\n{notice}".encode()
                else:
                    self.area.take(notice.encode())

    def finish(self, timeout_seconds: float = _LAST_CHANCE_SECONDS) -> None:
        """Show the rest, as long as someone reads; no one is waited for twice."""
        self.show()
        poll = select.poll()
        poll.register(self._own_fd, select.POLLOUT)
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

    def close(self) -> None:
        """Release the descriptor."""
        os.close(self._own_fd)

    def _write(self, data: bytes) -> int:
        if not self._is_socket:
            return os.write(self._own_fd, data)
        with socket.socket(fileno=os.dup(self._own_fd)) as copy:
            return copy.send(data, socket.MSG_DONTWAIT)


_screens: dict[int, Screen] = {}


def screen_of(descriptor: int) -> Screen:
    """Return the screen for the file that is open under a descriptor now; OSError for none.
    Descriptors of one terminal share it."""
    status = os.fstat(descriptor)
    target = (status.st_dev, status.st_ino, status.st_rdev)
    known = _screens.pop(descriptor, None)
    others = list(_screens.values())
    if known is not None and known.target != target:
        if known not in others:
            known.close()
        known = None
    shared = (
        one for one in others if one.target == target and stat.S_ISCHR(status.st_mode)
    )
    found = _screens[descriptor] = known or next(shared, None) or Screen(descriptor)
    return found


def show(descriptor: int, data: bytes, source: object = None) -> None:
    """Write to one of our streams without waiting; nothing where it is closed. ``source`` is who
    writes: no one's unfinished line takes in what another one writes."""
    with contextlib.suppress(OSError):
        screen = screen_of(descriptor)
        if screen.area is None:
            screen.write(data)
        else:
            screen.area.take(data, source)


def settle(descriptor: int, source: object) -> None:
    """Let what ``source`` has left unfinished on a terminal scroll away."""
    with contextlib.suppress(OSError):
        area = screen_of(descriptor).area
        if area is not None:
            area.settle(source)


def show_waiting() -> None:
    """Write what could not be shown so far, where someone reads again."""
    for screen in _screens.values():
        screen.show()


def finish() -> None:
    """Show the rest of everything, as long as someone reads."""
    for screen in _screens.values():
        screen.finish()


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
    """Have this process's own prints and log lines go to screens, within the block."""
    open_closed_streams()
    old = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = new = _unblocked(old[0]), _unblocked(old[1])
    own = {
        one.fileno(): one for one, was in zip(new, old, strict=True) if one is not was
    }
    moved = []
    for handler in log_handlers():
        with contextlib.suppress(AttributeError, OSError, ValueError):
            if (stream := own.get(handler.stream.fileno())) is not None:
                moved.append((handler, handler.setStream(stream)))
    try:
        yield
    finally:
        for handler, before in moved:
            if before is not None:
                handler.setStream(before)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        sys.stdout, sys.stderr = old
        finish()


def log_handlers() -> list[logging.StreamHandler[TextIO]]:
    """Return what writes the launcher's log lines to streams."""
    handlers = (
        *logging.getLogger().handlers,
        *logging.getLogger("robust_train").handlers,
    )
    return [one for one in handlers if isinstance(one, logging.StreamHandler)]


def flush_output() -> None:
    """Write out what this process has printed, as far as that is possible."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def open_closed_streams() -> None:
    """Open the standard streams that are closed (``>&-``), or a lock of ours would be one."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _unblocked(stream: TextIO) -> TextIO:
    if not isinstance(
        stream, io.TextIOWrapper
    ):  # a notebook's descriptor is no part of the page
        return stream
    try:
        stream.flush()
        raw = io.BufferedWriter(_RawScreen(stream.fileno()))
        errors = "replace" if stream.errors == "strict" else stream.errors
        return io.TextIOWrapper(
            raw, stream.encoding, errors, line_buffering=True, write_through=True
        )
    except (AttributeError, OSError, ValueError):
        return stream
