"""This job among the host's jobs: its line, its reservation, and what happens without them.

Whatever is wrong with the queue directory, the job goes on: one warning tells what is wrong and
what helps, and from then on GPUs are chosen by free memory alone.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from robust_train.gpu.visible import Visible
from robust_train.queue import quarantine
from robust_train.queue.line import Line
from robust_train.queue.queue_dir import QueueProblem
from robust_train.queue.records import JobState
from robust_train.queue.reservations import Ledger, Reservation, new_record
from robust_train.queue.tenancy import Tenancy
from robust_train.queue.wait import GpuRequest, NoGpu, WaitStatus, wait_for_gpu
from robust_train.values import GpuInfo, Group

log = logging.getLogger("robust_train")

Read = Callable[[bool], Visible]


class Sleep(Protocol):
    """Waits some seconds, but not past the moment when ``wake`` becomes readable."""

    def __call__(self, seconds: float, wake: int | None = None) -> None: ...


class HostQueue:
    """A job's dealings with the other jobs of its host.

    Args:
        directory: the queue directory; None for no reservations at all.
        name: what people know the job by.
        run_dir: its run folder.
        jobs_per_device: how many jobs it suffers on a GPU of its own, itself included.
        read: looks at the GPUs; its argument says whether to list processes.
        token: the last part of the job's id, six hexadecimal digits; empty: any.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        name: str,
        run_dir: str,
        jobs_per_device: int,
        read: Read,
        token: str = "",
    ) -> None:
        self._token = token
        self._job_id: str | None = None
        self._directory = directory
        self._name = name
        self._run_dir = run_dir
        self._jobs_per_device = jobs_per_device
        self._read_machine = read
        self._ledger: Ledger | None = None
        self._tenancy: Tenancy | None = None

    @property
    def hold(self) -> int | None:
        """The descriptor that keeps the reservation alive; None where there is none."""
        return None if self._tenancy is None else self._tenancy.reservation.fd

    @property
    def job_id(self) -> str | None:
        """As ``robust-train queue`` shows it, or did last; None before the job had a ticket."""
        return self._job_id

    def wait(
        self, request: GpuRequest, announce: Callable[[WaitStatus], None], sleep: Sleep
    ) -> Group | NoGpu:
        """Stand in line for GPUs and reserve them; a job that comes back keeps its ticket."""
        tenancy, self._tenancy = self._tenancy, None
        try:
            ledger = self._open()
            if ledger is not None:
                place = None if tenancy is None else tenancy.reservation
                return self._wait_in_line(ledger, place, request, announce, sleep)
        except QueueProblem as problem:
            self._do_without(problem)
        return wait_for_gpu(request, read=self._read, announce=announce, sleep=sleep)

    def open_gpus(self) -> tuple[GpuInfo, ...]:
        """The GPUs that the job could have now, its own included; ``free_bytes`` as usable."""
        try:
            if self._tenancy is not None:
                return self._tenancy.open_gpus(self._read_memory)
        except QueueProblem as problem:
            self._do_without(problem)
        return self._read_memory().gpus

    def look(self) -> Visible:
        """All GPUs that the job may use, those that proved sick marked as unusable."""
        return self._read(False)

    def take(self, uuids: Sequence[str], claim_bytes: int) -> bool:
        """Make sure that the reservation is for the next attempt's GPUs, if there are any.

        Args:
            uuids: of the GPUs, in the order of the ranks; none for the CPU: then everything is
                given back.
            claim_bytes: memory that the attempt needs on each of them.

        Returns:
            False where another job has one of them by now, and a new choice has to be made.
        """
        if self._tenancy is None:
            return True
        if not uuids:
            self.release()
            return True
        try:
            if set(uuids) != set(self._tenancy.gpus):
                return self._tenancy.move(uuids, claim_bytes, self._read_memory)
            self._tenancy.claim(uuids, claim_bytes, self._read_memory)
        except QueueProblem as problem:
            self._do_without(problem)
        return True

    def put_aside(self, uuid: str, reason: str) -> None:
        """Have the host's jobs avoid a GPU that proved sick."""
        if self._ledger is not None:
            quarantine.put_aside(self._ledger.directory, uuid, reason)

    def report(self, taken_bytes: int, rank: int = 0) -> None:
        """Tell the others how much the attempt has allocated on the GPU of one of its ranks."""
        if self._tenancy is not None:
            with contextlib.suppress(QueueProblem):
                self._tenancy.report(taken_bytes, rank)

    def drain(self) -> None:
        """Tell the others that the attempt is gone and its memory on the way back."""
        if self._tenancy is not None:
            with contextlib.suppress(QueueProblem):
                self._tenancy.drain()

    def release(self) -> None:
        """Give everything back; what still lives of an attempt keeps its GPUs."""
        tenancy, self._tenancy = self._tenancy, None
        if tenancy is not None:
            tenancy.reservation.release()
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger.close()

    def _open(self) -> Ledger | None:
        if self._ledger is None and self._directory is not None:
            self._ledger = Ledger(self._directory)
        return self._ledger

    def _wait_in_line(
        self,
        ledger: Ledger,
        place: Reservation | None,
        request: GpuRequest,
        announce: Callable[[WaitStatus], None],
        sleep: Sleep,
    ) -> Group | NoGpu:
        record = new_record(
            self._name, self._run_dir, request.min_bytes, self._jobs_per_device, request.count
        )
        record = replace(record, id=self._token)
        line = Line(ledger, record, place, 2 * request.interval_seconds + 5)

        def tell(status: WaitStatus) -> None:
            if line.reservation is not None:
                self._job_id = line.reservation.record.id
            announce(status)

        try:
            return wait_for_gpu(
                request,
                read=self._read,
                announce=tell,
                sleep=lambda seconds: sleep(seconds, line.fd),
                line=line,
            )
        finally:
            line.leave()
            reservation = line.reservation
            if reservation is not None and reservation.record.state is not JobState.WAITING:
                self._tenancy = Tenancy(ledger, reservation)
                self._job_id = reservation.record.id

    def _read(self, processes: bool) -> Visible:
        """The GPUs, those that proved sick marked as unusable."""
        visible = self._read_machine(processes)
        if self._ledger is None:
            return visible
        sick = quarantine.read_sick(self._ledger.directory)
        if not sick:
            return visible
        return replace(
            visible,
            gpus=quarantine.without_sick(visible.gpus, sick),
            machine=quarantine.without_sick(visible.machine, sick),
        )

    def _read_memory(self) -> Visible:
        return self._read(False)

    def _do_without(self, problem: QueueProblem) -> None:
        log.warning("%s; this job goes on without a reservation", problem)
        self._directory = None
        self.release()
