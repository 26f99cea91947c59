"""The jobs of a host as the scheduler takes them."""

from __future__ import annotations

from collections.abc import Iterable

from robust_train.queue.records import JobRecord, JobState
from robust_train.queue.reservations import Entry
from robust_train.queue.scheduler import Holding, Waiter


def census(
    entries: Iterable[Entry], *, without: str | None = None
) -> tuple[list[Waiter], list[Holding]]:
    """The living jobs as the scheduler takes them: who waits, and who holds.

    Args:
        entries: the living jobs.
        without: id of one to leave out.
    """
    waiters, holdings = [], []
    for entry in entries:
        record = entry.record
        if entry.id == without:
            continue
        if record is None:
            holdings.append(Holding(entry.id, None, 0))
        elif record.state is JobState.WAITING:
            waiters.append(as_waiter(record))
        else:
            holdings += _as_holdings(record)
    return waiters, holdings


def as_waiter(record: JobRecord) -> Waiter:
    """A job as one that asks for GPUs."""
    return Waiter(
        record.id,
        record.ticket,
        record.claim_bytes,
        frozenset(record.only),
        record.jobs_per_device,
        record.queued_at,
        record.count,
    )


def _as_holdings(record: JobRecord) -> list[Holding]:
    return [
        Holding(
            id=record.id,
            gpu=gpu,
            claim_bytes=record.claim_bytes,
            taken_bytes=taken_bytes,
            jobs_per_device=record.jobs_per_device,
            since=record.since,
            draining=record.state is JobState.DRAINING,
            owner=f"{record.name}, {record.user}",
            ticket=record.ticket,
        )
        for gpu, taken_bytes in zip(record.gpus, record.taken_bytes, strict=True)
    ]
