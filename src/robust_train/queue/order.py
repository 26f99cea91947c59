"""The order of the queue: who waits, who has what, and who goes first. Pure.

``docs/decisions/0013-fair-among-users.md`` has the rules, and proves that overtaking is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

MOST_OVERTAKEN = 8
"""So many later jobs of others start before a user's first waiting job; then it is due."""


@dataclass(frozen=True)
class WaitingJob:
    """A job that needs ``need_bytes`` on each of ``count`` GPUs; fields as in ``JobRecord``.

    ``user`` owns the record's file, which cannot be made up; ``owner`` is for people.
    """

    id: str
    ticket: int
    need_bytes: int
    only: frozenset[str]
    jobs_per_device: int = 1
    queued_at: float = 0.0
    count: int = 1
    user: int = 0
    owner: str = ""
    overtaken: int = 0

    @property
    def order(self) -> tuple[int, float, str]:
        """First come, first served; lower goes first."""
        return self.ticket, self.queued_at, self.id


@dataclass(frozen=True)
class GpuReservation:
    """A job's reservation on one of its GPUs; fields as in ``JobRecord``.

    ``gpu`` is None if the record cannot be read; ``owner`` is for people: ``lora_flowers102, ada``.
    """

    id: str
    gpu: str | None
    reserved_bytes: int
    taken_bytes: int | None = None
    jobs_per_device: int = 1
    since: float = 0.0
    draining: bool = False
    owner: str = ""
    ticket: int = 0
    user: int = 0


@dataclass(frozen=True)
class QueueRules:
    """``order``: fair or fifo; ``used``: GPU-hours that each user had lately."""

    order: str = "fair"
    max_gpus_per_user: int | None = None
    used: Mapping[int, float] = field(default_factory=dict)


DEFAULT_RULES = QueueRules()


def queue_order(
    waiting: Iterable[WaitingJob], reservations: Iterable[GpuReservation], rules: QueueRules
) -> list[WaitingJob]:
    """Return the waiting jobs in the order in which they are served."""
    by_ticket = sorted(waiting, key=lambda job: job.order)
    if rules.order == "fifo":
        return by_ticket
    queues: dict[int, deque[WaitingJob]] = {}
    for job in by_ticket:
        queues.setdefault(job.user, deque()).append(job)
    has = {user: len(gpus) for user, gpus in held_gpus(reservations).items()}
    overtaken = {job.id: job.overtaken for job in by_ticket}
    ordered = []
    while heads := {user: queue[0] for user, queue in queues.items() if queue}:
        user = min(heads, key=lambda u: (has.get(u, 0), rules.used.get(u, 0.0), heads[u].order))
        passed = [head for head in heads.values() if head.order < heads[user].order]
        due = [head for head in passed if overtaken[head.id] >= MOST_OVERTAKEN]
        job = min(due, key=lambda head: head.order, default=heads[user])
        for head in passed:
            overtaken[head.id] += head.order < job.order
        ordered.append(queues[job.user].popleft())
        has[job.user] = has.get(job.user, 0) + job.count
    return ordered


def held_gpus(reservations: Iterable[GpuReservation]) -> dict[int, set[str]]:
    """Return the UUIDs of the GPUs that each user holds."""
    held: dict[int, set[str]] = {}
    for reservation in reservations:
        if reservation.gpu is not None:
            held.setdefault(reservation.user, set()).add(reservation.gpu)
    return held


def why_overtaken(
    job: WaitingJob,
    ordered: Sequence[WaitingJob],
    reservations: Iterable[GpuReservation],
    rules: QueueRules,
) -> str | None:
    """Return why a later job of another user goes before this one; None if none does."""
    has = {user: len(gpus) for user, gpus in held_gpus(reservations).items()}
    for other in ordered[: ordered.index(job)]:
        theirs, mine = has.get(other.user, 0), has.get(job.user, 0)
        if other.user == job.user or other.order < job.order:
            has[other.user] = theirs + other.count
            continue
        used, mine_used = (rules.used.get(user, 0.0) for user in (other.user, job.user))
        why = f"{other.owner} used fewer GPU-hours lately ({used:.1f}; {job.owner} {mine_used:.1f})"
        if theirs < mine:
            why = (
                f"{other.owner} has fewer GPUs ({theirs}; {job.owner} {mine}), jobs ahead included"
            )
        elif theirs > mine or used >= mine_used:
            why = f"it was overtaken {MOST_OVERTAKEN} times"
        return f"job {other.id} of {other.owner} goes first: {why}"
    return None
