"""Redirects this process's prints and log lines to a `Screen`, so that it never waits for a reader,
and opens standard streams that are closed.

Commands and launchers use it. Attempts print as usual, into a pipe that the launcher reads.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from robust_train.host import screen


@contextlib.contextmanager
def never_blocking_output() -> Iterator[None]:
    """Send this process's own prints and log lines to screens, within the block."""
    open_closed_streams()
    old = (sys.stdout, sys.stderr)
    new = [_stream_to_screen(stream) for stream in old]
    sys.stdout, sys.stderr = new
    moved = []
    for handler in log_handlers():
        for old_stream, new_stream in zip(old, new, strict=True):
            is_replaced = old_stream is not new_stream
            if is_replaced and descriptor_of(handler.stream) == old_stream.fileno():
                moved.append((handler, handler.setStream(new_stream)))
                break
    try:
        yield
    finally:
        for handler, before in moved:
            if before is not None:
                handler.setStream(before)
        flush_output()
        sys.stdout, sys.stderr = old
        screen.finish()


def _stream_to_screen(stream: TextIO) -> TextIO:
    """Return a stream that writes to the screen behind ``stream``, or ``stream`` itself if it has
    no descriptor."""
    if not isinstance(stream, io.TextIOWrapper) or descriptor_of(stream) < 0:
        return stream
    flush_output()
    # A name that the terminal's encoding lacks must not end the job.
    errors = "replace" if stream.errors == "strict" else stream.errors
    return io.TextIOWrapper(  # type: ignore[type-var]
        _RawScreen(stream.fileno()),
        stream.encoding,
        errors,
        line_buffering=True,
        write_through=True,
    )


class _RawScreen(io.RawIOBase):
    """Passes the bytes of a text stream to the screen behind a descriptor."""

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
        screen.show(self._descriptor, content)
        return len(content)


def log_handlers() -> list[logging.StreamHandler[TextIO]]:
    """Return the log handlers that write the launcher's lines to streams."""
    handlers = logging.getLogger().handlers + logging.getLogger("robust_train").handlers
    return [handler for handler in handlers if isinstance(handler, logging.StreamHandler)]


def flush_output() -> None:
    """Flush stdout and stderr. An error is ignored."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def open_closed_streams() -> None:
    """Open the standard streams that are closed (``>&-``) on /dev/null. Otherwise the next file
    that is opened, for example a lock file, would become the standard output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def descriptor_of(stream: TextIO) -> int:
    """Return the descriptor that a stream writes to, or -1 if it has none.

    Only text files count. A notebook's stream is another object, whose ``fileno()`` is that of the
    terminal in which the notebook was started.
    """
    with contextlib.suppress(OSError, ValueError):
        if isinstance(stream, io.TextIOWrapper):
            return stream.fileno()
    return -1
