"""Watch the queue directory for jobs that end or change.

The kernel sends an event when the last descriptor that may write to a file is closed, also by
SIGKILL: that is when a reservation ends. Without inotify (a limit, a sandbox) waiting jobs poll.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct

_MODIFIED, _CLOSED_AFTER_WRITE, _DELETED_SELF, _OVERFLOW = 0x2, 0x8, 0x400, 0x4000
_HEADER = struct.Struct("iIII")


class Watch:
    """Collects the names of the files that changed in one directory."""

    def __init__(self, directory_fd: int) -> None:
        self.fd: int | None = None
        """Becomes readable when something changed; None without inotify."""
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            fd = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        except AttributeError:
            return
        if fd < 0:
            return
        # by the descriptor: the directory's path may lead elsewhere by now
        path = os.fsencode(f"/proc/self/fd/{directory_fd}/")
        events = ctypes.c_uint32(_MODIFIED | _CLOSED_AFTER_WRITE | _DELETED_SELF)
        if libc.inotify_add_watch(fd, path, events) < 0:
            os.close(fd)
            return
        self.fd = fd

    def read(self) -> list[tuple[str, bool]]:
        """Return the files that changed since the last call, and whether a last writer closed them.
        An empty name is the directory itself, or events that were lost."""
        if self.fd is None:
            return []
        try:
            data = os.read(self.fd, 1 << 16)
        except OSError:
            return []
        found, at = [], 0
        while at + _HEADER.size <= len(data):
            _, events, _, length = _HEADER.unpack_from(data, at)
            at += _HEADER.size
            name = data[at : at + length].rstrip(b"\0").decode(errors="replace")
            at += length
            found.append((name, bool(events & (_CLOSED_AFTER_WRITE | _OVERFLOW))))
        return found

    def close(self) -> None:
        """Watch nothing any more."""
        fd, self.fd = self.fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)
