"""Agreement of several ranks to act at the same step of their loops, without a collective."""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from robust_train.model.errors import TrainingStopped

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

STOP = "stop"
CHECKPOINT = "checkpoint"
FLAGS = (STOP, CHECKPOINT)
_WORD = 8

_POLL_SECONDS = 0.1
_HELD_SECONDS = 0.005
_ANSWER_SECONDS = 60.0
_ANSWER_SECONDS_AT_STOP = 5.0
"""A process that was asked to stop is killed soon. A rank that is silent then has ended."""


def next_due(flag: str, due: int, fewest: int, most: int) -> int:
    """Return the look at which a raised flag is due. ``fewest`` and ``most`` count the looks of a
    rank so far."""
    return most + 1 if not due or (flag == CHECKPOINT and fewest >= due) else due


class Flags(Protocol):
    """How several ranks see at the same step what they are asked for."""

    def look(self, flag: str, rank: int) -> int:
        """Return which raising of ``flag`` is due at this look of ``rank``, 0 for none."""

    def raise_flag(self, flag: str) -> None:
        """Show ``flag`` to every rank."""


class OneRank:
    """The same for a process that is alone. No lock: a signal's handler may interrupt itself."""

    def __init__(self) -> None:
        self._raised = dict.fromkeys(FLAGS, 0)

    def look(self, flag: str, rank: int) -> int:
        """Return how often ``flag`` was raised."""
        return self._raised[flag]

    def raise_flag(self, flag: str) -> None:
        """Raise ``flag`` for the next look."""
        self._raised[flag] += 1


class Votes:
    """Count in shared memory how often each rank has looked at each flag.

    A raised flag becomes due at the look after that of the furthest rank. No rank has reached it
    yet, so all see it at the same look, which is the same step if their loops are alike. Counting
    and reading happen under a lock, which the kernel releases when its holder dies. Raising takes
    no lock, because a signal handler may interrupt a look.

    ``descriptor`` is the file in memory of the other ranks. None creates a new file.
    """

    def __init__(self, ranks: int, descriptor: int | None = None) -> None:
        self._row = ranks + 2  # raised, due, and the looks of each rank
        self._size = len(FLAGS) * self._row * _WORD
        self.descriptor = os.memfd_create("votes") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, self._size)
        self._words = memoryview(mmap.mmap(self.descriptor, self._size)).cast("q")
        self._thread_lock = threading.Lock()

    def look(self, flag: str, rank: int) -> int:
        """Count a look of ``rank``, and return the number of the look at which the flag is due, or
        0.

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
        """Show ``flag`` to all ranks.

        A flag that ends the attempt stays due for good. A checkpoint that some ranks have yet to
        see does not become due again, because the others would see it twice.
        """
        self._words[FLAGS.index(flag) * self._row] = 1

    def close(self) -> None:
        """Close the file in memory here. The ranks keep it."""
        os.close(self.descriptor)

    def _set_due(self, flag: str, row: int) -> None:
        if not self._words[row]:
            return
        self._words[row] = 0
        due = self._words[row + 1]
        looks = self._words[row + 2 : row + self._row]
        self._words[row + 1] = next_due(flag, due, min(looks), max(looks))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of all ranks and threads."""
        # POSIX locks are a process's own: a fork does not share its parent's
        with self._thread_lock:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self.descriptor, fcntl.LOCK_UN)


class StoreVotes:
    """Votes of ranks on any machines, through their rendezvous store. A context manager.

    A raised flag becomes due in a round. With two ranks, of which rank 1 raises the flag::

        rank 1  raises the flag after its look 7, and says so in the store
        all     hold their looks at the flag: rank 0 after its look 9, rank 1 after its look 7
        rank 0  reads both numbers, and writes that the flag is due at look 10
        all     continue, and each acts at its own look 10, so in the same step

    While no flag is raised, a thread of each rank polls the store.
    """

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self._ranks = range(ranks)
        self._store = store
        self._rank = rank
        self._lock = threading.Lock()
        self._looks = dict.fromkeys(FLAGS, 0)
        self._due = dict.fromkeys(FLAGS, 0)
        # looks of this rank when it raised the flag, until that is passed on
        self._raised: dict[str, int] = {}
        # flags for which this rank awaits a round
        self._is_asked: set[str] = set()
        self._held = ""
        self._rounds = 0
        # On rank 0, the number of raised flags that were handled.
        self._seen = dict.fromkeys(FLAGS, 0)
        self._is_stopping = self._is_over = False
        self._thread = threading.Thread(target=self._follow, daemon=True, name="votes")

    def __enter__(self) -> StoreVotes:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        self._thread.join(2.0)

    def look(self, flag: str, rank: int) -> int:
        """Count a look, and return the number of the look at which the flag is due, or 0. It stays
        due until it is raised again."""
        since = time.monotonic()
        while True:
            with self._lock:
                if self._held != flag:
                    self._looks[flag] += 1
                    due = self._due[flag]
                    return due if due and self._looks[flag] >= due else 0
            limit = _ANSWER_SECONDS_AT_STOP if self._is_stopping else _ANSWER_SECONDS
            if time.monotonic() - since > limit:
                raise TrainingStopped("the other ranks do not answer")
            time.sleep(_HELD_SECONDS)

    def raise_flag(self, flag: str) -> None:
        """Raise ``flag`` on every rank. This takes no lock, because a signal handler may interrupt
        a look."""
        self._raised[flag] = self._looks[flag]
        self._is_stopping |= flag == "stop"

    def _follow(self) -> None:
        try:
            while not self._is_over:
                self._poll()
                time.sleep(_POLL_SECONDS)
            self._store.set(f"ended/{self._rank}", "")
        except RuntimeError:  # the store is gone, and so is the job
            pass
        finally:
            self._held = ""

    def _poll(self) -> None:
        for flag in FLAGS:
            if flag in self._is_asked or flag not in self._raised:
                continue
            # what was raised before its own look was due is dealt with
            if self._raised.pop(flag) >= self._due[flag]:
                self._is_asked.add(flag)
                self._store.add(f"raised/{flag}", 1)
        if self._rank == 0 and not self._held:
            self._begin_round()
        if not self._held and self._store.check([f"round/{self._rounds + 1}"]):
            self._rounds += 1
            flag = self._store.get(f"round/{self._rounds}").decode()
            with self._lock:
                self._held = flag
                looks = self._looks[flag]
            self._store.set(f"looks/{self._rounds}/{self._rank}", str(looks))
        if not self._held:
            return
        if self._rank == 0:
            self._end_round(self._held)
        if self._store.check([f"due/{self._rounds}"]):
            due = int(self._store.get(f"due/{self._rounds}"))
            self._is_asked.discard(self._held)
            with self._lock:
                self._due[self._held] = due
                self._held = ""

    def _begin_round(self) -> None:
        for flag in FLAGS:
            raised = self._store.add(f"raised/{flag}", 0)
            if raised > self._seen[flag]:
                self._seen[flag] = raised
                self._store.set(f"round/{self._rounds + 1}", flag)
                return

    def _end_round(self, flag: str) -> None:
        """Set when the flag is due, once every rank has answered or ended."""
        here = [f"looks/{self._rounds}/{rank}" for rank in self._ranks]
        answered = [key for key in here if self._store.check([key])]
        silent = [rank for rank in self._ranks if here[rank] not in answered]
        if all(self._store.check([f"ended/{rank}"]) for rank in silent):
            looks = [json.loads(self._store.get(key)) for key in answered]
            due = next_due(flag, self._due[flag], min(looks), max(looks))
            self._store.set(f"due/{self._rounds}", str(due))
