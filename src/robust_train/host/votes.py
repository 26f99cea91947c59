"""Flags that all ranks of an attempt see at the same step of their loops, without a collective.

A flag asks the ranks to stop or to save a checkpoint. The trainer of each rank reads both flags
once per step, through ``attempt/stops.py``, and every rank counts its reads. A raised flag is not
shown at once, because one rank may be a step ahead of another. It becomes due at a read that no
rank has reached yet: if rank 0 has read the flag 9 times and rank 1 has read it 7 times, both see
it at their own read 10, which is the same step of their loops.

`Votes` serves the ranks of one launcher, through shared memory: the launcher creates it, and each
attempt opens it by its descriptor. `OneRank` is for an attempt with one rank. Ranks of an engine
such as torchrun, which may be on several machines, use ``host/store_votes.py``.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Protocol

STOP = "stop"
CHECKPOINT = "checkpoint"
FLAGS = (STOP, CHECKPOINT)

_WORD_BYTES = 8
# Positions of the words in a flag's row of the shared memory.
_RAISED = 0
_DUE = 1
_FIRST_RANK = 2


class Flags(Protocol):
    """The flags of an attempt, as one of its ranks reads and raises them."""

    def read_flag(self, flag: str, rank: int) -> int:
        """Count this read of ``rank``, and return 0 if ``flag`` is not due yet.

        Otherwise the result is a number that grows with each request, so that the reader can
        recognize a new request. A flag stays due until it is raised again.
        """

    def raise_flag(self, flag: str) -> None:
        """Make ``flag`` due for every rank."""


class OneRank:
    """The flags of an attempt with one rank, which need not agree with another rank. Takes no lock,
    because a signal handler may re-enter it."""

    def __init__(self) -> None:
        self._raised = dict.fromkeys(FLAGS, 0)

    def read_flag(self, flag: str, rank: int) -> int:
        """Return how many times ``flag`` was raised."""
        return self._raised[flag]

    def raise_flag(self, flag: str) -> None:
        """Make ``flag`` due at the next read."""
        self._raised[flag] += 1


class Votes:
    """Flags of several ranks on one machine, in shared memory.

    The memory has a row of numbers for each flag: whether it was raised, the read at which it is
    due, and how many times each rank has read it. The rank that first reads a raised flag decides
    when the flag is due, under a lock that the kernel releases if the rank dies. Raising takes no
    lock, because a signal handler may interrupt a read.

    Args:
        ranks: number of ranks.
        descriptor: the open memory file of the other ranks, or None to create the file.
    """

    def __init__(self, ranks: int, descriptor: int | None = None) -> None:
        self._row = _FIRST_RANK + ranks
        self._size = len(FLAGS) * self._row * _WORD_BYTES
        self.descriptor = os.memfd_create("votes") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, self._size)
        self._words = memoryview(mmap.mmap(self.descriptor, self._size)).cast("q")
        self._thread_lock = threading.Lock()

    def read_flag(self, flag: str, rank: int) -> int:
        """Count this read of ``rank``. Return the number of the read at which ``flag`` became due,
        or 0 if it is not due yet."""
        row = FLAGS.index(flag) * self._row
        with self.locked():
            self._schedule_if_raised(flag, row)
            reads_of_rank = row + _FIRST_RANK + rank
            self._words[reads_of_rank] += 1
            due: int = self._words[row + _DUE]
            return due if due and self._words[reads_of_rank] >= due else 0

    def _schedule_if_raised(self, flag: str, row: int) -> None:
        if not self._words[row + _RAISED]:
            return
        self._words[row + _RAISED] = 0
        reads = self._words[row + _FIRST_RANK : row + self._row]
        self._words[row + _DUE] = next_due(flag, self._words[row + _DUE], min(reads), max(reads))

    def raise_flag(self, flag: str) -> None:
        """Make ``flag`` due for every rank, at a read that the next reader chooses."""
        self._words[FLAGS.index(flag) * self._row + _RAISED] = 1

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of all ranks, and of all threads of this rank."""
        # A forked process does not hold the POSIX locks of its parent, so ranks exclude each other.
        with self._thread_lock:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the memory file in this process. The ranks keep it open."""
        os.close(self.descriptor)


def next_due(flag: str, due: int, fewest_reads: int, most_reads: int) -> int:
    """Return the read at which a raised flag is due.

    The next read of the rank that has read most comes later than any read so far. STOP keeps the
    read at which it first became due. So does a checkpoint that some rank has not seen yet, because
    the ranks that have seen it would save a second time.

    Args:
        flag: the raised flag.
        due: the read at which the flag is due already, 0 if it was never raised before.
        fewest_reads: number of reads of the rank that has read it least.
        most_reads: number of reads of the rank that has read it most.
    """
    is_seen_by_all = fewest_reads >= due
    if due == 0 or (flag == CHECKPOINT and is_seen_by_all):
        return most_reads + 1
    return due
