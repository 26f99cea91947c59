"""One job in the host's queue: it polls until it has its GPUs.

Each poll decides under the queue lock, on fresh figures of the GPUs, and writes the job's record
before the lock is released. A driver that hangs is asked before the lock is taken, unless it
answered lately; a job that waits for it reports no usable GPU, and so delays nobody.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from robust_train.gpu.nvml_session import known_session
from robust_train.gpu.processes import user_name
from robust_train.gpu.visible import Visible
from robust_train.queue.inotify import Watch
from robust_train.queue.order import GpuReservation, QueueRules, WaitingJob, queue_order
from robust_train.queue.queue_rules import read_rules
from robust_train.queue.reasons import why_waiting
from robust_train.queue.records import JobRecord, JobState
from robust_train.queue.reservations import (
    PREFIX,
    JobRegistry,
    LiveJob,
    RegistryBusy,
    Reservation,
    boottime,
)
from robust_train.queue.scheduler import Plan, Untaken, plan, to_pass_over, untaken
from robust_train.values import GpuInfo, Group

_LOCK_SECONDS = 2.0
_SETTLE_SECONDS = 5.0
_POSITION_SECONDS = 0.02
_SETTLE_PAUSE_SECONDS = 0.2
_WITHOUT_EVENTS_SECONDS = 1.0
_TRUST_SECONDS = 5.0


@dataclass(frozen=True)
class PollResult:
    """Result of one scheduling attempt."""

    gpus: Group = ()  # the job's GPUs, `free_bytes` as far as it can count on them; none: wait on
    position: int = 1  # in the queue, 1 for the first
    obstacles: str = ""  # why it waits, in one sentence
    strangers_only: bool = False  # no other job of ours is in the way
    # when to poll again though nothing changes; None: at the usual interval
    again_seconds: float | None = None


class QueuedJob:
    """One job's queue position, from its first poll until it has GPUs or leaves. A job that comes
    back has its ``reservation``."""

    def __init__(
        self, registry: JobRegistry, record: JobRecord, reservation: Reservation | None = None
    ) -> None:
        self.reservation = reservation
        self._registry = registry
        self._template = record
        self._directory = registry.directory
        self._watch: Watch | None = None  # from the first poll in vain on: to close one takes 10 ms
        self._answered_at = -math.inf
        self._untaken: Untaken = {}
        self._later: set[str] | None = None
        self._polled_at = -math.inf
        self._position = 1
        self._settle_until = 0.0

    @property
    def fd(self) -> int | None:
        """Becomes readable when :meth:`has_changed` may be true; None without inotify."""
        return None if self._watch is None else self._watch.fd

    def poll(self, read: Callable[[], Visible], may_use: Callable[[GpuInfo], bool]) -> PollResult:
        """Take GPUs if the scheduler gives this job any, else return why not.

        Raises:
            QueueProblem: the queue directory cannot be used any more.
        """
        self.has_changed()  # what happened until now is seen by this poll
        unanswered = None
        lately = time.monotonic() < self._answered_at + _TRUST_SECONDS
        if not lately or known_session() is None:
            visible = read()
            unanswered = None if self._note(visible) else visible
        try:
            with self._registry.locked(_LOCK_SECONDS):
                found = self._decide(unanswered or read(), may_use)
        except RegistryBusy as error:
            return PollResult(obstacles=str(error), again_seconds=_SETTLE_PAUSE_SECONDS)
        self._polled_at, self._position = time.monotonic(), found.position
        if found.gpus:
            return found
        if self._watch is None:  # once more, for what has changed before there was a watch
            self._watch = Watch(self._directory.fd)
            return replace(found, again_seconds=0.0)
        return replace(found, again_seconds=self._again())

    def has_changed(self) -> bool:
        """Return whether something happened in the queue that is worth a poll."""
        if self._watch is None:
            return False
        mine = None if self.reservation is None else self.reservation.name
        changed = {
            name: is_closed
            for name, is_closed in self._watch.read()
            if not name or (name.startswith(PREFIX) and name != mine)
        }
        if any(changed.values()):  # memory of a job that has ended comes back a little later
            self._settle_until = time.monotonic() + _SETTLE_SECONDS
        return bool(changed)

    @property
    def pause_seconds(self) -> float:
        """At least this long before the next poll: the first in the queue goes first."""
        pause = min(_POSITION_SECONDS * (self._position - 1), 0.4)
        return max(self._polled_at + pause - time.monotonic(), 0.0)

    def leave(self) -> None:
        """Leave the queue, or, with GPUs, just stop watching it."""
        self._stop_watching()
        if self.reservation is not None and self.reservation.record.state is JobState.WAITING:
            self.reservation.release()
            self.reservation = None

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _decide(self, visible: Visible, may_use: Callable[[GpuInfo], bool]) -> PollResult:
        self._note(visible)
        if self._registry.directory is not self._directory:  # it was removed and made again
            self._directory = self._registry.directory
            self._stop_watching()
        jobs = self._registry.jobs(sweep=True)
        me = self._enter(jobs)
        gpus = visible.machine or visible.gpus
        usable = tuple(gpu.uuid for gpu in visible.gpus if may_use(gpu))
        others, reservations = split(jobs, without=me.record.id)
        mine = as_waiting(me.record, os.geteuid())
        overtaken = self._overtakers(mine, others, reservations)
        record = replace(me.record, only=usable, overtaken=overtaken)
        mine = as_waiting(record, mine.user)
        rules = read_rules(self._directory, jobs)
        if not visible.answered:
            me.update(record)
            ordered = queue_order([*others, mine], reservations, rules)
            return PollResult(position=ordered.index(mine) + 1, obstacles=visible.problem or "")
        decided = self._plan([*others, mine], reservations, gpus, record.id, rules)
        granted = decided.groups.get(record.id)
        if granted is not None:
            me.update(record.on([gpu.uuid for gpu in granted]))
            return PollResult(granted)
        me.update(record)
        in_the_way = any(r.gpu is None or r.gpu in mine.only for r in reservations)
        return PollResult(
            position=decided.order.index(mine) + 1,
            obstacles=why_waiting(mine, reservations, gpus, decided),
            strangers_only=decided.order[0] == mine and not in_the_way,
        )

    def _plan(
        self,
        waiting: Sequence[WaitingJob],
        reservations: Sequence[GpuReservation],
        gpus: Sequence[GpuInfo],
        my_id: str,
        rules: QueueRules,
    ) -> Plan:
        """Plan without those who do not take their GPUs; record who does not take them now."""
        now = boottime()
        decided = everybody = plan(waiting, reservations, gpus, now, rules)
        skipped = to_pass_over(self._untaken, now) & everybody.groups.keys()
        if skipped:
            present = [w for w in waiting if w.id not in skipped]
            decided = plan(present, reservations, gpus, now, rules)
        granted = (everybody.groups.keys() | decided.groups.keys()) - {my_id}
        self._untaken = untaken(self._untaken, granted, now)
        return decided

    def _overtakers(
        self, me: WaitingJob, waiting: Sequence[WaitingJob], running: Sequence[GpuReservation]
    ) -> int:
        """Return how many later jobs of others have started while this was its user's first."""
        later = {r.id for r in running if r.gpu and r.user != me.user and r.ticket > me.ticket}
        is_first = not any(job.user == me.user and job.order < me.order for job in waiting)
        new = set() if self._later is None or not is_first else later - self._later
        self._later = later if is_first else None
        return me.overtaken + len(new)

    def _note(self, visible: Visible) -> bool:
        self._answered_at = time.monotonic() if visible.answered else -math.inf
        return visible.answered

    def _enter(self, jobs: Sequence[LiveJob]) -> Reservation:
        if self.reservation is None:
            self.reservation = self._registry.enter(self._template, jobs)
        elif self.reservation.record.state is not JobState.WAITING:
            record = replace(self.reservation.record.on(()), count=self._template.count)
            self.reservation.update(record)
        return self.reservation

    def _again(self) -> float | None:
        if time.monotonic() < self._settle_until:
            return max(_SETTLE_PAUSE_SECONDS, self.pause_seconds)
        if self._untaken or self._answered_at == -math.inf or self.fd is None:
            return _WITHOUT_EVENTS_SECONDS
        return None


def split(
    jobs: Iterable[LiveJob], *, without: str | None = None
) -> tuple[list[WaitingJob], list[GpuReservation]]:
    """Return the living jobs for the scheduler: who waits, and the reservations.

    The job with the id ``without`` is left out.
    """
    waiting, reservations = [], []
    for job in jobs:
        record = job.record
        if job.id == without:
            continue
        if record is None:
            reservations.append(GpuReservation(job.id, None, 0, owner=user_name(job.owner)))
        elif record.state is JobState.WAITING:
            waiting.append(as_waiting(record, job.owner))
        else:
            reservations += _as_reservations(record, job.owner)
    return waiting, reservations


def as_waiting(record: JobRecord, user: int) -> WaitingJob:
    """Return a job for the scheduler, as one that needs GPUs; ``user`` owns its file."""
    need, only = record.reserved_bytes, frozenset(record.only)
    per_device, about = record.jobs_per_device, (record.count, user, record.user, record.overtaken)
    return WaitingJob(record.id, record.ticket, need, only, per_device, record.queued_at, *about)


def _as_reservations(record: JobRecord, user: int) -> list[GpuReservation]:
    return [
        GpuReservation(
            id=record.id,
            gpu=gpu,
            reserved_bytes=record.reserved_bytes,
            taken_bytes=taken_bytes,
            jobs_per_device=record.jobs_per_device,
            since=record.since,
            draining=record.state is JobState.DRAINING,
            owner=f"{record.name}, {record.user}",
            ticket=record.ticket,
            user=user,
        )
        for gpu, taken_bytes in zip(record.gpus, record.taken_bytes, strict=True)
    ]
