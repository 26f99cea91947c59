"""What several ranks do at the same step of their loops, agreed upon without a collective."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Protocol

STOP, RESTART, CHECKPOINT = "stop", "restart", "checkpoint"
FLAGS = (STOP, RESTART, CHECKPOINT)
_WORD = 8


def next_due(flag: str, due: int, fewest: int, most: int) -> int:
    """Return at which look a raised flag is due; ``fewest``, ``most``: looks of a rank so far."""
    return most + 1 if not due or (flag == CHECKPOINT and fewest >= due) else due


class Flags(Protocol):
    """How several ranks see at the same step what they are asked for."""

    def look(self, flag: str, rank: int) -> int:
        """Return which raising of ``flag`` is due at this look of ``rank``, 0 for none."""

    def raise_flag(self, flag: str) -> None:
        """Have every rank see ``flag``."""


class Votes:
    """Count in shared memory how often each rank has looked at each flag.

    A flag that is raised becomes due one look after that of the rank that is furthest: no rank has
    got there yet, so all see it at the same look, which is the same step of loops that are alike.
    Counting and reading happen under one lock, which the kernel releases when its holder dies.
    Raising takes no lock, for a signal's handler may interrupt a look.

    ``descriptor`` is the file in memory of the other ranks; None makes a new one.
    """

    def __init__(self, ranks: int, descriptor: int | None = None) -> None:
        self._row = ranks + 2  # raised, due, and the looks of each rank
        self._size = len(FLAGS) * self._row * _WORD
        self.descriptor = os.memfd_create("votes") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, self._size)
        self._words = memoryview(mmap.mmap(self.descriptor, self._size)).cast("q")
        self._own_file: tuple[int, int] | None = None
        self._thread_lock = threading.Lock()

    def look(self, flag: str, rank: int) -> int:
        """Count a look of ``rank``; return the number of the look at which the flag is due, or 0.

        It stays due until it is raised again.
        """
        row = FLAGS.index(flag) * self._row
        with self.locked():
            self._set_due(flag, row)
            mine = row + 2 + rank
            self._words[mine] += 1
            due: int = self._words[row + 1]
            return due if due and self._words[mine] >= due else 0

    def raise_flag(self, flag: str) -> None:
        """Have all ranks see ``flag``.

        What ends the attempt stays due for good. A checkpoint that some ranks have still to see is
        not due again: those that have seen it would see it a second time.
        """
        self._words[FLAGS.index(flag) * self._row] = 1

    def close(self) -> None:
        """Close the file in memory; the ranks keep it."""
        os.close(self.descriptor)

    def _set_due(self, flag: str, row: int) -> None:
        if not self._words[row]:
            return
        self._words[row] = 0
        due, looks = self._words[row + 1], self._words[row + 2 : row + self._row]
        self._words[row + 1] = next_due(flag, due, min(looks), max(looks))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of all ranks and threads."""
        with self._thread_lock:
            pid = os.getpid()
            if self._own_file is None or self._own_file[0] != pid:
                # opened again: a fork shares its parent's file description, and so its lock
                path = f"/proc/self/fd/{self.descriptor}"
                self._own_file = pid, os.open(path, os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(self._own_file[1], fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._own_file[1], fcntl.LOCK_UN)
