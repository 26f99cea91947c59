"""What several ranks do at the same place of their loops, agreed upon without a collective."""

from __future__ import annotations

import mmap
import multiprocessing

from robust_train.run import CHECKPOINT, RESTART, STOP

_FLAGS = (STOP, RESTART, CHECKPOINT)
_WORD = 8
_PATIENCE_SECONDS = 1.0


class Votes:
    """Counts in shared memory how often each rank has looked at each flag.

    A flag that is raised becomes due one look after that of the rank that is furthest: no rank has
    got there yet, so all see it at the same look, which is the same step of loops that are alike.
    Counting and reading happen under one lock, or a rank could slip past between the two.

    Made before the ranks are forked.

    Args:
        ranks: how many there are.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._memory = mmap.mmap(-1, len(_FLAGS) * (ranks + 1) * _WORD)
        self._words = memoryview(self._memory).cast("q")
        # a signal's handler may raise a flag while its own thread looks at one
        self._lock = multiprocessing.get_context("fork").RLock()

    def look(self, flag: str, rank: int) -> int:
        """Count a look of ``rank``. The number of the look at which the flag is due, 0 if not yet.

        It stays due until it is raised anew.
        """
        place = self._place(flag)
        self._acquire()
        try:
            self._words[place + 1 + rank] += 1
            due: int = self._words[place]
            return due if due and self._words[place + 1 + rank] >= due else 0
        finally:
            self._lock.release()

    def raise_flag(self, flag: str) -> None:
        """Have all ranks see ``flag``.

        Nothing where some have still to see it: those that have would see it a second time. Only
        checkpoints are wished for again and again; what ends the attempt is due for good.
        """
        place = self._place(flag)
        self._acquire()
        try:
            looks = self._words[place + 1 : place + 1 + self._ranks]
            due = self._words[place]
            if not due or (flag == CHECKPOINT and min(looks) >= due):
                self._words[place] = max(looks) + 1
        finally:
            self._lock.release()

    def _place(self, flag: str) -> int:
        return _FLAGS.index(flag) * (self._ranks + 1)

    def _acquire(self) -> None:
        if not self._lock.acquire(timeout=_PATIENCE_SECONDS):
            raise RuntimeError("a rank died while it held the lock of the group's flags")
