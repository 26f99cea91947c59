"""Flags that ranks on several machines see at the same step, through torch's rendezvous store.

Each rank of an engine's job, for example of torchrun, has a `StoreVotes`, which
``launcher/guest.py`` creates in the process of the rank. ``host/votes.py`` describes the flags.
"""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING

from robust_train.host.votes import FLAGS, STOP, next_due
from robust_train.model.errors import TrainingStopped

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_POLL_SECONDS = 0.1  # between two polls of the store
_PAUSED_SECONDS = 0.005  # between two looks at whether the round has ended
_ROUND_SECONDS = 60.0  # longest wait for the other ranks in a round
# A process that was asked to stop is killed soon, so a rank that is silent then has ended.
_ROUND_SECONDS_AT_STOP = 5.0


class StoreVotes:
    """Flags of ranks on any machines, through their rendezvous store. A context manager.

    While no flag is raised, a thread of each rank polls the store, and reading a flag costs
    nothing. For a raised flag the threads hold a round, in which the ranks agree on the read at
    which the flag is due. With two ranks, of which rank 1 raises the flag::

        rank 1  raises the flag after its read 7, and adds 1 to raised/stop in the store
        rank 0  sees raised/stop, and opens round 1 for the flag
        all     pause their reads of the flag, rank 0 after its read 9 and rank 1 after its read 7,
                and write these numbers to the store
        rank 0  reads both numbers, and writes that the flag is due at read 10
        all     continue, and each acts at its own read 10, which is the same step of their loops
    """

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self._store = store
        self._rank = rank
        self._ranks = range(ranks)
        self._lock = threading.Lock()
        self._reads = dict.fromkeys(FLAGS, 0)
        self._due = dict.fromkeys(FLAGS, 0)
        # For each flag that this rank raised, its reads at that time, until the thread handles it.
        self._raised: dict[str, int] = {}
        # Flags for which this rank has asked for a round that has not ended.
        self._requested: set[str] = set()
        self._rounds = 0
        # The flag of the current round, whose reads are paused.
        self._paused_flag: str | None = None
        # On rank 0, how many raised flags have had their round.
        self._handled = dict.fromkeys(FLAGS, 0)
        self._is_stopping = False
        self._is_over = False
        self._thread = threading.Thread(target=self._follow_store, daemon=True, name="votes")

    def __enter__(self) -> StoreVotes:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        self._thread.join(2.0)

    def read_flag(self, flag: str, rank: int) -> int:
        """Count this read. Return the number of the read at which ``flag`` became due, or 0 if it
        is not due yet. Waits while a round decides about the flag.

        Raises:
            TrainingStopped: the other ranks do not answer.
        """
        since = time.monotonic()
        while True:
            with self._lock:
                if self._paused_flag != flag:
                    self._reads[flag] += 1
                    due = self._due[flag]
                    return due if due and self._reads[flag] >= due else 0
            limit = _ROUND_SECONDS_AT_STOP if self._is_stopping else _ROUND_SECONDS
            if time.monotonic() - since > limit:
                raise TrainingStopped("the other ranks do not answer")
            time.sleep(_PAUSED_SECONDS)

    def raise_flag(self, flag: str) -> None:
        """Make ``flag`` due for every rank. This takes no lock, because a signal handler may
        interrupt a read."""
        self._raised[flag] = self._reads[flag]
        if flag == STOP:
            self._is_stopping = True

    # --- the thread that polls the store ----------------------------------------------------------

    def _follow_store(self) -> None:
        try:
            while not self._is_over:
                self._poll()
                time.sleep(_POLL_SECONDS)
            self._store.set(f"ended/{self._rank}", "")
        except RuntimeError:
            # The store has ended, and the job with it.
            pass
        finally:
            self._paused_flag = None

    def _poll(self) -> None:
        self._request_rounds()
        if self._paused_flag is None:
            if self._rank == 0:
                self._open_round()
            self._join_round()
        if self._paused_flag is not None:
            if self._rank == 0:
                self._decide_round(self._paused_flag)
            self._leave_decided_round(self._paused_flag)

    def _request_rounds(self) -> None:
        """Ask rank 0 for a round for each flag that this rank raised."""
        for flag in FLAGS:
            if flag in self._requested or flag not in self._raised:
                continue
            reads = self._raised.pop(flag)
            # A flag that was raised before its due read is dealt with at that read.
            if reads >= self._due[flag]:
                self._requested.add(flag)
                self._store.add(f"raised/{flag}", 1)

    def _open_round(self) -> None:
        """Open the next round if any rank asked for one. Only rank 0 does."""
        for flag in FLAGS:
            raised = self._store.add(f"raised/{flag}", 0)
            if raised > self._handled[flag]:
                self._handled[flag] = raised
                self._store.set(f"round/{self._rounds + 1}", flag)
                return

    def _join_round(self) -> None:
        """Pause reads of the flag if a round is open, and write how many there were."""
        if not self._store.check([f"round/{self._rounds + 1}"]):
            return
        self._rounds += 1
        flag = self._store.get(f"round/{self._rounds}").decode()
        with self._lock:
            self._paused_flag = flag
            reads = self._reads[flag]
        self._store.set(f"reads/{self._rounds}/{self._rank}", str(reads))

    def _decide_round(self, flag: str) -> None:
        """Write when the flag is due, once every rank has answered or ended. Only rank 0 does."""
        reads = []
        for rank in self._ranks:
            answer = f"reads/{self._rounds}/{rank}"
            if self._store.check([answer]):
                reads.append(json.loads(self._store.get(answer)))
            elif not self._store.check([f"ended/{rank}"]):
                return
        due = next_due(flag, self._due[flag], min(reads), max(reads))
        self._store.set(f"due/{self._rounds}", str(due))

    def _leave_decided_round(self, flag: str) -> None:
        """Continue reads of the flag if rank 0 has decided when it is due."""
        if not self._store.check([f"due/{self._rounds}"]):
            return
        due = int(self._store.get(f"due/{self._rounds}"))
        self._requested.discard(flag)
        with self._lock:
            self._due[flag] = due
            self._paused_flag = None
