"""Being told of changes in the queue directory, by the kernel.

When the last descriptor that may write to a file is closed, there is an event, also where SIGKILL
closed it. That is exactly when a reservation ends, so a waiter sleeps on one descriptor instead of
in one thread for each lock. Where inotify is not to be had (a user's limit of instances, a
sandbox), the waiter looks a few times a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct

MODIFIED = 0x2
ATTRIBUTES = 0x4
CLOSED_AFTER_WRITE = 0x8
LOST = -1
"""Stands for the number of a watch where the kernel had to drop events."""
_DONT_FOLLOW = 0x02000000
_OVERFLOW = 0x4000
_HEADER = struct.Struct("iIII")


class Watch:
    """Tells what happened to files of one directory. A context manager.

    Args:
        directory_fd: the directory.
    """

    def __init__(self, directory_fd: int) -> None:
        self._directory_fd = directory_fd
        self._libc = ctypes.CDLL(None, use_errno=True)
        try:
            self._fd = int(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        except AttributeError:
            self._fd = -1

    @property
    def fd(self) -> int | None:
        """Becomes readable when something happened; None where the kernel tells nothing."""
        return self._fd if self._fd >= 0 else None

    def add(self, name: str, events: int) -> int | None:
        """Watch a file, or with an empty name the whole directory; a number to know it by."""
        if self._fd < 0:
            return None
        # by the descriptor: the directory's path may lead elsewhere by now
        path = f"/proc/self/fd/{self._directory_fd}/{name}"
        watched = self._libc.inotify_add_watch(
            self._fd, os.fsencode(path), ctypes.c_uint32(events | (_DONT_FOLLOW if name else 0))
        )
        return watched if watched >= 0 else None

    def drop(self, watched: int | None) -> None:
        """Watch that no longer."""
        if watched is not None and self._fd >= 0:
            self._libc.inotify_rm_watch(self._fd, watched)

    def read(self) -> list[tuple[int, int, str]]:
        """What happened since the last call: number of the watch, events, name in the directory."""
        if self._fd < 0:
            return []
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:
            return []
        found, at = [], 0
        while at + _HEADER.size <= len(data):
            watched, events, _, length = _HEADER.unpack_from(data, at)
            at += _HEADER.size
            name = data[at : at + length].rstrip(b"\0").decode(errors="replace")
            at += length
            if events & _OVERFLOW:
                watched, events = LOST, MODIFIED | CLOSED_AFTER_WRITE
            found.append((watched, events, name))
        return found

    def close(self) -> None:
        """Watch nothing any more."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1
