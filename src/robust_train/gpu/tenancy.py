"""What a job with a GPU does in the host's queue: move, claim, tell what it took, give back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from robust_train.gpu.census import as_waiter, census
from robust_train.gpu.records import JobState
from robust_train.gpu.reservations import Ledger, LedgerBusy, Reservation, boottime
from robust_train.gpu.scheduler import open_to
from robust_train.gpu.visible import Visible
from robust_train.types import GpuInfo

_PATIENCE_SECONDS = 1.0


class Tenancy:
    """A job's reservation on a GPU.

    Args:
        ledger: the host's jobs.
        reservation: of this job, with a GPU.
    """

    def __init__(self, ledger: Ledger, reservation: Reservation) -> None:
        self._ledger = ledger
        self.reservation = reservation

    @property
    def gpu(self) -> str | None:
        """UUID of the GPU."""
        return self.reservation.record.gpu

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

    def move(self, uuid: str, claim_bytes: int, read: Callable[[], Visible]) -> bool:
        """Take another GPU in place of this one, if it is still to be had; else nothing changes.

        Args:
            uuid: of the other GPU.
            claim_bytes: what is needed there.
            read: looks at the GPUs.

        Raises:
            QueueProblem: the queue directory cannot be used any more.
        """
        try:
            with self._deciding(read) as visible:
                if all(gpu.uuid != uuid for gpu in self._open_gpus(visible, claim_bytes)):
                    return False
                self._say(JobState.RUNNING, gpu=uuid, claim_bytes=claim_bytes, taken_bytes=None)
        except LedgerBusy:
            return False
        return True

    def claim(self, claim_bytes: int, read: Callable[[], Visible]) -> None:
        """Say what the next attempt on the same GPU will need, as far as others leave it.

        Raises:
            QueueProblem: the queue directory cannot be used any more.
        """
        try:
            with self._deciding(read) as visible:
                here = [gpu for gpu in self._open_gpus(visible, 0) if gpu.uuid == self.gpu]
                room = here[0].free_bytes if here else self.reservation.record.claim_bytes
                self._say(JobState.RUNNING, claim_bytes=min(claim_bytes, room), taken_bytes=None)
        except LedgerBusy:
            return

    def report(self, taken_bytes: int) -> None:
        """Say how much the attempt has allocated; left out where others decide just now."""
        self._try_to_say(self.reservation.record.state, taken_bytes=taken_bytes)

    def drain(self) -> None:
        """Say that the attempt is gone, and that its memory is on the way back."""
        self._try_to_say(JobState.DRAINING, taken_bytes=None)

    @contextlib.contextmanager
    def _deciding(self, read: Callable[[], Visible]) -> Iterator[Visible]:
        """Under the ledger lock, with a fresh look at the GPUs."""
        read()  # a driver that hangs does so before the lock is taken
        with self._ledger.locked():
            yield read()

    def _try_to_say(self, state: JobState, **changes: int | None) -> None:
        try:
            with self._ledger.locked(_PATIENCE_SECONDS):
                self._say(state, **changes)
        except LedgerBusy:
            return

    def _say(self, state: JobState, **changes: int | str | None) -> None:
        self.reservation.update(replace(self.reservation.record, state=state, **changes))  # type: ignore[arg-type]

    def _open_gpus(self, visible: Visible, claim_bytes: int) -> tuple[GpuInfo, ...]:
        record = self.reservation.record
        waiters, holdings = census(self._ledger.entries(sweep=True), without=record.id)
        mine = frozenset(gpu.uuid for gpu in visible.gpus)
        me = replace(as_waiter(record), need_bytes=claim_bytes, only=mine)
        gpus: Sequence[GpuInfo] = visible.machine or visible.gpus
        return open_to(me, waiters, holdings, gpus, boottime())
