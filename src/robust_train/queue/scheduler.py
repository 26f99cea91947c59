"""Which job gets which GPU now: one pure function over queue, reservations and GPUs.

GPUs are kept for the first job that none suits; others may overtake it elsewhere.
``docs/decisions/0006-a-reservation-is-a-lock.md`` gives the rules and their reasons.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from robust_train.gpu.select import choose_group, could_ever_fit, tie_breaker
from robust_train.queue.order import (
    DEFAULT_RULES,
    GpuReservation,
    QueueRules,
    WaitingJob,
    held_gpus,
    queue_order,
)
from robust_train.values import GpuInfo, Group

_DOUBLES_EVERY_SECONDS = 300.0
_TAKE_SECONDS = 5.0
_UNSEEN_SECONDS = 3.0


@dataclass(frozen=True)
class Plan:
    """What the scheduler decided."""

    # by job id all the GPUs that a job gets, best first; `free_bytes` as usable
    groups: Mapping[str, Group] = field(default_factory=dict)
    first: str | None = None  # the first job in the queue that gets nothing now
    # UUIDs of the GPUs kept for it, the one that suits it soonest in front
    kept: tuple[str, ...] = ()
    order: tuple[WaitingJob, ...] = ()  # all waiting jobs, as they are served
    # why jobs get nothing because of `max_gpus_per_user`
    capped: Mapping[str, str] = field(default_factory=dict)


def plan(
    waiting: Iterable[WaitingJob],
    reservations: Sequence[GpuReservation],
    gpus: Sequence[GpuInfo],
    now: float = 0.0,
    rules: QueueRules = DEFAULT_RULES,
) -> Plan:
    """Decide who gets which GPU at ``now``, in seconds on the clock of ``queued_at``. Unusable GPUs
    are not granted."""
    planner = _Planner(reservations, gpus, now, rules)
    ordered = queue_order(waiting, reservations, rules)
    for job in ordered:
        planner.serve(job)
    first = None if planner.first is None else planner.first.id
    return Plan(planner.groups, first, planner.kept, tuple(ordered), planner.capped)


def open_to(
    me: WaitingJob,
    waiting: Iterable[WaitingJob],
    reservations: Sequence[GpuReservation],
    gpus: Sequence[GpuInfo],
    now: float = 0.0,
    rules: QueueRules = DEFAULT_RULES,
) -> tuple[GpuInfo, ...]:
    """Return the GPUs that a job may take now, after the jobs before it; ``free_bytes`` as usable.

    A job of several GPUs may take any of them. ``waiting`` and ``reservations`` are other jobs'.
    """
    planner = _Planner(reservations, gpus, now, rules)
    for job in queue_order([*waiting, me], reservations, rules):
        if job.id == me.id:
            break
        planner.serve(job)
    return tuple(state.as_gpu() for state in planner.suitable(me))


Untaken = Mapping[str, tuple[float, float]]
"""By job id since when its GPUs are free for it and not taken, and when that was last seen."""


def untaken(before: Untaken, granted: Iterable[str], now: float) -> Untaken:
    """Return ``before``, updated for the jobs that get GPUs by the plan and have not taken them."""
    noted = {}
    for id_ in granted:
        since, seen = before.get(id_, (now, now))
        noted[id_] = (since if now - seen <= _UNSEEN_SECONDS else now, now)
    return noted


def to_pass_over(noted: Untaken, now: float) -> frozenset[str]:
    """Return the jobs that have not taken their GPUs for some seconds: stopped ones (Ctrl-Z)."""
    return frozenset(
        id_
        for id_, (since, seen) in noted.items()
        if seen - since >= _TAKE_SECONDS and now - seen <= _UNSEEN_SECONDS
    )


class GpuState:
    """One GPU, and the room that is left on it."""

    def __init__(self, gpu: GpuInfo, reservations: Sequence[GpuReservation], shut: bool) -> None:
        self.gpu = gpu
        self.reservations = reservations
        self.count = len(reservations)
        most = 1 if self.is_exclusive() else 1 << 30
        self.limit = min([most, *(r.jobs_per_device for r in reservations)])
        if shut or gpu.unusable is not None:
            self.limit = 0
        outstanding = sum(max(r.reserved_bytes - (r.taken_bytes or 0), 0) for r in reservations)
        committed = sum(max(r.reserved_bytes, r.taken_bytes or 0) for r in reservations)
        self.usable = min(gpu.free_bytes - outstanding, gpu.total_bytes - committed)

    def suits(self, job: WaitingJob) -> bool:
        return (
            self.usable >= job.need_bytes
            and self.count < min(self.limit, job.jobs_per_device)
            and self.gpu.uuid in job.only
        )

    def take(self, job: WaitingJob) -> None:
        self.usable -= job.need_bytes
        self.count += 1
        self.limit = min(self.limit, job.jobs_per_device)

    def is_exclusive(self) -> bool:
        """Return whether its compute mode lets one process alone use it."""
        return self.gpu.compute_mode.startswith("exclusive") and not self.gpu.mps

    def is_unhealthy(self) -> bool:
        """Return whether it stays unusable when its jobs end; an exclusive one's owner may end."""
        return self.gpu.unusable is not None and not self.gpu.compute_mode.startswith("exclusive")

    def as_gpu(self) -> GpuInfo:
        return replace(self.gpu, free_bytes=max(self.usable, 0))

    def distance(self, job: WaitingJob) -> tuple[bool, bool, float, int, int, float, str]:
        """Return a sort key; the GPU that suits the job soonest comes first.

        Jobs of strangers end nobody knows when. Then count who overtook the job there, what is
        missing, and who began first.
        """
        ours = sum(in_use(r, self.gpu) for r in self.reservations)
        by_strangers = min(self.gpu.free_bytes + ours, self.gpu.total_bytes) < job.need_bytes
        slots = self.count - min(self.limit or job.jobs_per_device, job.jobs_per_device) + 1
        began = min((0.0 if h.draining else h.since for h in self.reservations), default=0.0)
        return (
            by_strangers,
            self.gpu.unusable is not None,
            self._overtaken(job),
            max(job.need_bytes - self.usable, 0),
            max(slots, 0),
            began,
            self.gpu.pci_bus_id + self.gpu.uuid,
        )

    def _overtaken(self, job: WaitingJob) -> float:
        """Return when a later job that is in the way last came here, 0 if there is none.

        It keeps the set of kept GPUs stable: a kept one gets no such job.
        """
        later = [h for h in self.reservations if h.ticket > job.ticket]
        if not later:
            return 0.0
        fits = sum(h.reserved_bytes for h in later) + job.need_bytes <= self.gpu.total_bytes
        slots = len(later) < min(job.jobs_per_device, *(h.jobs_per_device for h in later))
        return 0.0 if fits and slots else max(h.since for h in later)


class _Planner:
    """Serves one job after the other; the GPUs of one are not there for the next."""

    def __init__(
        self,
        reservations: Sequence[GpuReservation],
        gpus: Sequence[GpuInfo],
        now: float,
        rules: QueueRules,
    ) -> None:
        self._now = now
        self._most = rules.max_gpus_per_user
        self._held = held_gpus(reservations)
        self.capped: dict[str, str] = {}
        self._states = gpu_states(reservations, gpus)
        self.groups: dict[str, Group] = {}
        self.first: WaitingJob | None = None
        self.kept: tuple[str, ...] = ()

    def serve(self, job: WaitingJob) -> None:
        group = self._choose(job)
        if group:
            self.groups[job.id] = tuple(state.as_gpu() for state in group)
            for state in group:
                state.take(job)
            self._held.setdefault(job.user, set()).update(state.gpu.uuid for state in group)
        elif self._is_capped(job):
            has = f"{len(self._held.get(job.user, ()))} of at most {self._most} GPUs"
            self.capped[job.id] = f"{job.owner} holds {has} (max_gpus_per_user)"
        elif self.first is None:
            self.first = job
            self.kept = self._keep(job)

    def suitable(self, job: WaitingJob) -> list[GpuState]:
        """Return the GPUs that it may have now, best first."""
        open_states = (s for s in self._states.values() if s.gpu.uuid not in self.kept)
        if self._is_capped(job):  # it may share those that its user holds
            held = self._held.get(job.user, ())
            open_states = (state for state in open_states if state.gpu.uuid in held)
        fullest = 1 if job.jobs_per_device > 1 else -1  # a tight fit leaves room for large jobs
        return sorted(
            (state for state in open_states if state.suits(job)),
            key=lambda s: (self._first_could(s), fullest * s.usable, tie_breaker(s.gpu)),
        )

    def _is_capped(self, job: WaitingJob) -> bool:
        """Return whether it would have more GPUs than its user may hold."""
        held = len(self._held.get(job.user, ()))
        return self._most is not None and held + job.count > self._most

    def _choose(self, job: WaitingJob) -> Sequence[GpuState]:
        """Return all the GPUs that it needs, or none."""
        found = self.suitable(job)
        if job.count == 1:
            return found[:1]
        apart = [state for state in found if not self._first_could(state)]
        for states in (apart, found):
            group = choose_group([state.gpu for state in states], job.count)
            if group:
                return [self._states[gpu.uuid] for gpu in group]
        return ()

    def _first_could(self, state: GpuState) -> bool:
        first = self.first
        return (
            first is not None
            and state.gpu.uuid in first.only
            and could_ever_fit(state.gpu, first.need_bytes)
        )

    def _keep(self, job: WaitingJob) -> tuple[str, ...]:
        """Return as many as it needs at first, twice as many every five minutes, in the end all.

        None while too few are healthy. GPUs that this process cannot see may be healthy.
        """
        possible = [
            state
            for state in self._states.values()
            if state.gpu.uuid in job.only and could_ever_fit(state.gpu, job.need_bytes)
        ]
        unseen = len(job.only - self._states.keys())
        if sum(not state.is_unhealthy() for state in possible) + unseen < job.count:
            return ()
        doublings = max(self._now - job.queued_at, 0.0) / _DOUBLES_EVERY_SECONDS
        count = job.count << min(int(doublings), 20)
        nearest = heapq.nsmallest(count, possible, key=lambda state: state.distance(job))
        return tuple(state.gpu.uuid for state in nearest)


def gpu_states(
    reservations: Collection[GpuReservation], gpus: Sequence[GpuInfo]
) -> dict[str, GpuState]:
    """Return each GPU's state by its UUID."""
    by_gpu: dict[str, list[GpuReservation]] = {}
    shut = False
    for reservation in reservations:
        if reservation.gpu is None:
            shut = True  # it may be on any of them
        else:
            by_gpu.setdefault(reservation.gpu, []).append(reservation)
    return {gpu.uuid: GpuState(gpu, by_gpu.get(gpu.uuid, ()), shut) for gpu in gpus}


def in_use(reservation: GpuReservation, gpu: GpuInfo) -> int:
    """Return what will be free when it ends: without a report a guess, used for no grant."""
    if reservation.taken_bytes is not None:
        return reservation.taken_bytes
    return min(reservation.reserved_bytes, gpu.used_bytes)
