"""What a job with GPUs does in the host's queue: move, claim, tell what it took, give back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from robust_train.gpu.visible import Visible
from robust_train.queue.census import as_waiter, census
from robust_train.queue.records import JobRecord, JobState
from robust_train.queue.reservations import Ledger, LedgerBusy, Reservation, boottime
from robust_train.queue.scheduler import open_to
from robust_train.values import GpuInfo

_PATIENCE_SECONDS = 1.0


class Tenancy:
    """A job's reservation on its GPUs.

    Args:
        ledger: the host's jobs.
        reservation: of this job, with GPUs.
    """

    def __init__(self, ledger: Ledger, reservation: Reservation) -> None:
        self._ledger = ledger
        self.reservation = reservation

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the GPUs, in the order of the ranks."""
        return self.reservation.record.gpus

    def open_gpus(self, read: Callable[[], Visible]) -> tuple[GpuInfo, ...]:
        """The GPUs that the job could have now, its own included; ``free_bytes`` as usable.

        Raises:
            QueueProblem: the queue directory cannot be used any more.
        """
        try:
            with self._deciding(read) as visible:
                return self._open_gpus(visible, 0)
        except LedgerBusy:
            return ()

    def move(self, uuids: Sequence[str], claim_bytes: int, read: Callable[[], Visible]) -> bool:
        """Take other GPUs in place of these, if all are still to be had; else nothing changes.

        Args:
            uuids: of all the GPUs that it is to have then, in the order of the ranks; some may be
                its own already.
            claim_bytes: what is needed on each of them.
            read: looks at the GPUs.

        Raises:
            QueueProblem: the queue directory cannot be used any more.
        """
        try:
            with self._deciding(read) as visible:
                to_be_had = {gpu.uuid for gpu in self._open_gpus(visible, claim_bytes)}
                if not to_be_had.issuperset(uuids):
                    return False
                self._say(self.reservation.record.on(uuids, claim_bytes))
        except LedgerBusy:
            return False
        return True

    def claim(self, uuids: Sequence[str], claim_bytes: int, read: Callable[[], Visible]) -> None:
        """Say what the next attempt on the same GPUs will need, as far as others leave it.

        Args:
            uuids: of the GPUs, in the order of the ranks.
            claim_bytes: what is needed on each of them.
            read: looks at the GPUs.

        Raises:
            QueueProblem: the queue directory cannot be used any more.
        """
        try:
            with self._deciding(read) as visible:
                here = [gpu for gpu in self._open_gpus(visible, 0) if gpu.uuid in uuids]
                room = self.reservation.record.claim_bytes
                if len(here) == len(uuids):
                    room = min(gpu.free_bytes for gpu in here)
                self._say(self.reservation.record.on(uuids, min(claim_bytes, room)))
        except LedgerBusy:
            return

    def report(self, taken_bytes: int, rank: int = 0) -> None:
        """Say how much the attempt has allocated; left out where others decide just now.

        Args:
            taken_bytes: on one of the GPUs.
            rank: which of them; a rank that has no GPU of its own is not heard.
        """
        record = self.reservation.record
        if 0 <= rank < len(record.gpus):
            taken = (*record.taken_bytes[:rank], taken_bytes, *record.taken_bytes[rank + 1 :])
            self._try_to_say(replace(record, taken_bytes=taken))

    def drain(self) -> None:
        """Say that the attempt is gone, and that its memory is on the way back."""
        record = self.reservation.record
        self._try_to_say(record.on(record.gpus, state=JobState.DRAINING))

    @contextlib.contextmanager
    def _deciding(self, read: Callable[[], Visible]) -> Iterator[Visible]:
        """Under the ledger lock, with a fresh look at the GPUs."""
        read()  # a driver that hangs does so before the lock is taken
        with self._ledger.locked():
            yield read()

    def _try_to_say(self, record: JobRecord) -> None:
        try:
            with self._ledger.locked(_PATIENCE_SECONDS):
                self._say(record)
        except LedgerBusy:
            return

    def _say(self, record: JobRecord) -> None:
        self.reservation.update(record)

    def _open_gpus(self, visible: Visible, claim_bytes: int) -> tuple[GpuInfo, ...]:
        record = self.reservation.record
        waiters, holdings = census(self._ledger.entries(sweep=True), without=record.id)
        mine = frozenset(gpu.uuid for gpu in visible.gpus)
        me = replace(as_waiter(record), need_bytes=claim_bytes, only=mine)
        gpus: Sequence[GpuInfo] = visible.machine or visible.gpus
        return open_to(me, waiters, holdings, gpus, boottime())
