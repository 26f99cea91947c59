"""What several ranks do at the same step of their loops, agreed upon without a collective."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence

from robust_train.run import CHECKPOINT, RESTART, STOP

FLAGS = (STOP, RESTART, CHECKPOINT)
_WORD = 8
_HELD_SECONDS = 0.005


def next_due(flag: str, due: int, fewest: int, most: int) -> int:
    """Return at which look a raised flag is due; ``fewest``, ``most``: looks of a rank so far."""
    return most + 1 if not due or (flag == CHECKPOINT and fewest >= due) else due


class Votes:
    """Count in shared memory how often each rank has looked at each flag.

    A flag that is raised becomes due one look after that of the rank that is furthest: no rank has
    got there yet, so all see it at the same look, which is the same step of loops that are alike.
    Counting and reading happen under one lock, which the kernel releases when its holder dies.
    Raising takes no lock, for a signal's handler may interrupt a look.

    Made before the ``ranks`` are forked, of which ``first`` is the first. Where there are more on
    other nodes (``is_part``), what is raised becomes due by :class:`.node_votes.NodeVotes`.
    """

    def __init__(self, ranks: int, first: int = 0, *, is_part: bool = False) -> None:
        self._row = ranks + 3  # raised, due, held, and the looks of each rank
        self._first, self._is_part = first, is_part
        # and a row for those that have begun
        words = (len(FLAGS) + 1) * self._row
        self._words = memoryview(mmap.mmap(-1, words * _WORD)).cast("q")
        self._file = os.memfd_create("votes")
        self._own_file: tuple[int, int] | None = None
        self._thread_lock = threading.Lock()

    def look(self, flag: str, rank: int) -> int:
        """Count a look of ``rank``; return the number of the look at which the flag is due, or 0.
        It stays due until it is raised anew."""
        row = FLAGS.index(flag) * self._row
        while True:
            with self.locked():
                if not self._words[row + 2]:
                    if not self._is_part:
                        self._take_raised(flag, row)
                    mine = row + 3 + rank - self._first
                    self._words[mine] += 1
                    due: int = self._words[row + 1]
                    return due if due and self._words[mine] >= due else 0
            time.sleep(_HELD_SECONDS)

    def raise_flag(self, flag: str) -> None:
        """Have all ranks see ``flag``. What ends the attempt stays due for good. A checkpoint that
        some have still to see is not due again: those that have seen it would see it a second time.
        """
        self._words[FLAGS.index(flag) * self._row] = 1

    def begin(self, rank: int) -> None:
        """Record that a rank is up."""
        self._words[len(FLAGS) * self._row + rank - self._first] = 1

    @property
    def begun(self) -> int:
        """How many ranks have begun."""
        return sum(self._words[len(FLAGS) * self._row :])

    def take_raised(self, flag: str) -> bool:
        """Return whether ``flag`` was raised here since this was called last."""
        row = FLAGS.index(flag) * self._row
        was_raised, self._words[row] = bool(self._words[row]), 0
        return was_raised

    def hold(self, flag: str) -> tuple[int, int]:
        """Let nobody look at ``flag`` until :meth:`release`; return the fewest and most looks."""
        row = FLAGS.index(flag) * self._row
        with self.locked():
            self._words[row + 2] = 1
            looks = self._words[row + 3 : row + self._row]
            return min(looks), max(looks)

    def release(self, flag: str, looks: Sequence[tuple[int, int]]) -> None:
        """Have ``flag`` due by what the nodes answered to :meth:`hold`, and let all look again."""
        row = FLAGS.index(flag) * self._row
        with self.locked():
            fewest, most = min(one for one, _ in looks), max(one for _, one in looks)
            self._words[row + 1] = next_due(flag, self._words[row + 1], fewest, most)
            self._words[row + 2] = 0

    def _take_raised(self, flag: str, row: int) -> None:
        if not self._words[row]:
            return
        self._words[row] = 0
        looks = self._words[row + 3 : row + self._row]
        self._words[row + 1] = next_due(flag, self._words[row + 1], min(looks), max(looks))

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
