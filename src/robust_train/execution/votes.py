"""What several ranks do at the same step of their loops, agreed upon without a collective."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator

from robust_train.run import CHECKPOINT, RESTART, STOP

_FLAGS = (STOP, RESTART, CHECKPOINT)
_WORD = 8


class Votes:
    """Count in shared memory how often each rank has looked at each flag.

    A flag that is raised becomes due one look after that of the rank that is furthest: no rank has
    got there yet, so all see it at the same look, which is the same step of loops that are alike.
    Counting and reading happen under one lock, which the kernel releases when its holder dies.
    Raising takes no lock, for a signal's handler may interrupt a look.

    Made before the ``ranks`` are forked.
    """

    def __init__(self, ranks: int) -> None:
        self._row = ranks + 2  # raised, due, and the looks of each rank
        self._words = memoryview(mmap.mmap(-1, len(_FLAGS) * self._row * _WORD)).cast("q")
        self._file = os.memfd_create("votes")
        self._own_file: tuple[int, int] | None = None
        self._thread_lock = threading.Lock()

    def look(self, flag: str, rank: int) -> int:
        """Count a look of ``rank``; return the number of the look at which the flag is due, or 0.
        It stays due until it is raised anew."""
        row = _FLAGS.index(flag) * self._row
        with self.locked():
            self._take_raised(flag, row)
            mine = row + 2 + rank
            self._words[mine] += 1
            due: int = self._words[row + 1]
            return due if due and self._words[mine] >= due else 0

    def raise_flag(self, flag: str) -> None:
        """Have all ranks see ``flag``. What ends the attempt stays due for good. A checkpoint that
        some have still to see is not due again: those that have seen it would see it a second time.
        """
        self._words[_FLAGS.index(flag) * self._row] = 1

    def _take_raised(self, flag: str, row: int) -> None:
        if not self._words[row]:
            return
        self._words[row] = 0
        due = self._words[row + 1]
        looks = self._words[row + 2 : row + self._row]
        if not due or (flag == CHECKPOINT and min(looks) >= due):
            self._words[row + 1] = max(looks) + 1

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of all ranks and threads."""
        with self._thread_lock:
            pid = os.getpid()
            if self._own_file is None or self._own_file[0] != pid:
                # opened anew: a fork shares its parent's file description, and so its lock
                path = f"/proc/self/fd/{self._file}"
                self._own_file = pid, os.open(path, os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(self._own_file[1], fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._own_file[1], fcntl.LOCK_UN)
