"""Which job gets which GPU now: one pure function over queue, reservations and GPUs.

First come, first served. For the first job that no GPU suits, the GPU that will suit it soonest is
kept: the jobs behind it may overtake, but only on GPUs where that cannot delay it. So it waits only
for jobs that already run, then the next one is first, and nobody waits for ever. The longer it
waits, the more GPUs are kept, since nobody knows which of them will be free first. A job that
overtakes takes a GPU that the first one could not use, if there is one.

A job of several GPUs gets all of them in one decision or none, so no job holds some while it waits
for others, and two such jobs cannot wait for each other. As many as it needs are kept for it. It
gets GPUs of one model where there are enough: all ranks wait for the slowest at every step.

Memory that a new job can count on is what NVML says is free, less what reservations have not taken
yet. A job has taken at least what it reported. Reservations never add up to more than a GPU has.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from robust_train.gpu.select import choose_group, could_ever_fit, label, needed
from robust_train.readable import mib
from robust_train.values import MIB, GpuInfo, Group

_MOST_GPUS_DESCRIBED = 4
_DOUBLES_EVERY_SECONDS = 300.0
_TAKE_SECONDS = 5.0
_UNSEEN_SECONDS = 3.0


@dataclass(frozen=True)
class WaitingJob:
    """A job in the queue; the fields are those of :class:`.records.JobRecord`.

    It needs ``need_bytes`` free on each of ``count`` GPUs.
    """

    id: str
    ticket: int
    need_bytes: int
    only: frozenset[str]
    jobs_per_device: int = 1
    queued_at: float = 0.0
    count: int = 1

    @property
    def order(self) -> tuple[int, float, str]:
        """Jobs sort by this; lower goes first."""
        return self.ticket, self.queued_at, self.id


@dataclass(frozen=True)
class GpuReservation:
    """A job's reservation on one GPU; a job of several GPUs has as many.

    The fields are those of :class:`.records.JobRecord`; ``gpu`` is None if that cannot be read, so
    that it may be any, and ``owner`` is for people: ``lora_flowers102, ada``.
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


@dataclass(frozen=True)
class Plan:
    """What the scheduler decided.

    Attributes:
        groups: by job id all the GPUs that a job gets, the best first, each with ``free_bytes``
            as far as the job can count on them.
        first: the first job in the queue that gets nothing now, None if there is no such job.
        kept: UUIDs of the GPUs that are kept for it, the one that suits it soonest in front; none
            if no end of a job could give it enough.
        awaited: of as many of these as it needs, those that do not suit it yet.
    """

    groups: Mapping[str, Group] = field(default_factory=dict)
    first: str | None = None
    kept: tuple[str, ...] = ()
    awaited: tuple[str, ...] = ()

    @property
    def grants(self) -> dict[str, GpuInfo]:
        """The first GPU of each job that gets any."""
        return {id_: group[0] for id_, group in self.groups.items()}


def plan(
    waiting: Iterable[WaitingJob],
    reservations: Sequence[GpuReservation],
    gpus: Sequence[GpuInfo],
    now: float = 0.0,
) -> Plan:
    """Decide who gets which GPU now.

    Args:
        waiting: the queue, in any order; tickets decide.
        reservations: all there are.
        gpus: the machine at this moment; unusable ones are not given.
        now: seconds, on the clock of ``queued_at``.
    """
    planner = _Planner(reservations, gpus, now)
    for job in sorted(waiting, key=lambda job: job.order):
        planner.serve(job)
    first = None if planner.first is None else planner.first.id
    return Plan(planner.groups, first, planner.kept, planner.awaited)


def open_to(
    me: WaitingJob,
    waiting: Iterable[WaitingJob],
    reservations: Sequence[GpuReservation],
    gpus: Sequence[GpuInfo],
    now: float = 0.0,
) -> tuple[GpuInfo, ...]:
    """Return the GPUs that a job may take now, after the jobs before it; ``free_bytes`` as usable.

    Each of them suits by itself, so a job of several GPUs may take any of them together. The
    arguments are those of :func:`plan`, ``reservations`` without the job's own.
    """
    planner = _Planner(reservations, gpus, now)
    for job in sorted(waiting, key=lambda job: job.order):
        if job.id != me.id and job.order < me.order:
            planner.serve(job)
    return tuple(state.as_gpu() for state in planner.suitable(me))


Untaken = Mapping[str, tuple[float, float]]
"""By job id since when its GPUs are free for it and not taken, and when that was last seen."""


def untaken(before: Untaken, granted: Iterable[str], now: float) -> Untaken:
    """Note which jobs have not taken the GPUs that the plan gives them.

    Args:
        before: what was noted at the last poll.
        granted: ids of the other jobs that get GPUs by the plan now.
        now: seconds.
    """
    noted = {}
    for id_ in granted:
        since, seen = before.get(id_, (now, now))
        noted[id_] = (since if now - seen <= _UNSEEN_SECONDS else now, now)
    return noted


def to_pass_over(noted: Untaken, now: float) -> frozenset[str]:
    """Return the jobs that do not count because they have not taken their GPUs for some seconds.

    A stopped job (Ctrl-Z) keeps its ticket and delays nobody for longer. A job that runs polls
    within a second and takes its GPUs then.
    """
    return frozenset(
        id_
        for id_, (since, seen) in noted.items()
        if seen - since >= _TAKE_SECONDS and now - seen <= _UNSEEN_SECONDS
    )


def why_not(
    job: WaitingJob, reservations: Sequence[GpuReservation], gpus: Sequence[GpuInfo], decided: Plan
) -> str:
    """Return in one sentence why a job gets none of its GPUs."""
    parts = [
        f"the record of job {r.id}{f' of {r.owner}' if r.owner else ''} cannot be read, so it may "
        "have any GPU"
        for r in reservations
        if r.gpu is None
    ]
    mine = [state for state in _states(reservations, gpus).values() if state.gpu.uuid in job.only]
    kept = () if decided.first in (None, job.id) else decided.kept
    for state in mine[:_MOST_GPUS_DESCRIBED]:
        text = _describe(state)
        if state.gpu.uuid in kept:
            text += f", and is kept for job {decided.first}, which came earlier"
        parts.append(text)
    if len(mine) > _MOST_GPUS_DESCRIBED:
        parts.append(f"and {len(mine) - _MOST_GPUS_DESCRIBED} more")
    need = f"needs {needed(job.need_bytes, job.count)}"
    if job.count > 1:
        available = sum(state.suits(job) and state.gpu.uuid not in kept for state in mine)
        need += f", {available} available now"
    return f"{need}; {'; '.join(parts) or 'none of its GPUs is there'}"


class _GpuState:
    """What one GPU still has to give."""

    def __init__(self, gpu: GpuInfo, reservations: Sequence[GpuReservation], shut: bool) -> None:
        self.gpu = gpu
        self.reservations = reservations
        self.count = len(reservations)
        alone = gpu.compute_mode.startswith("exclusive") and not gpu.mps
        self.limit = min([1 if alone else 1 << 30, *(r.jobs_per_device for r in reservations)])
        if shut or gpu.unusable is not None:
            self.limit = 0
        outstanding = sum(_outstanding(r) for r in reservations)
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

    def is_unhealthy(self) -> bool:
        """Whether no end of a job makes it usable; in exclusive mode that of its owner's does."""
        return self.gpu.unusable is not None and not self.gpu.compute_mode.startswith("exclusive")

    def as_gpu(self) -> GpuInfo:
        return replace(self.gpu, free_bytes=max(self.usable, 0))

    def distance(self, job: WaitingJob) -> tuple[bool, bool, float, int, int, float, str]:
        """Return a key by which the GPU that suits the job soonest sorts first.

        Processes of others end nobody knows when, our jobs do; then by who overtook it, see
        :meth:`_overtaken`; then by what is missing; then by who began first.
        """
        ours = sum(_in_use(r, self.gpu) for r in self.reservations)
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

        A GPU that is kept gets no job that overtakes, so it stays among those with the smallest
        values until another one's is smaller still: on the GPUs that are kept for the first waiting
        job no job is in its way that overtook it there.
        """
        later = [h for h in self.reservations if h.ticket > job.ticket]
        if not later:
            return 0.0
        fits = sum(h.reserved_bytes for h in later) + job.need_bytes <= self.gpu.total_bytes
        slots = len(later) < min(job.jobs_per_device, *(h.jobs_per_device for h in later))
        return 0.0 if fits and slots else max(h.since for h in later)


class _Planner:
    """Serves one job after the other; what one gets is gone for the next."""

    def __init__(
        self, reservations: Sequence[GpuReservation], gpus: Sequence[GpuInfo], now: float
    ) -> None:
        self._now = now
        self._states = _states(reservations, gpus)
        self._open = [state for state in self._states.values() if state.count < state.limit]
        self._find_largest()
        self.groups: dict[str, Group] = {}
        self.first: WaitingJob | None = None
        self.kept: tuple[str, ...] = ()
        self.awaited: tuple[str, ...] = ()

    def serve(self, job: WaitingJob) -> None:
        group = self._choose(job)
        if group:
            self.groups[job.id] = tuple(state.as_gpu() for state in group)
            for state in group:
                state.take(job)
                if state.count >= state.limit:
                    self._open.remove(state)
            self._find_largest()
        elif self.first is None:
            self.first = job
            self.kept = self._keep(job)
            nearest = self.kept[: job.count]
            self.awaited = tuple(uuid for uuid in nearest if not self._states[uuid].suits(job))
            self._open = [state for state in self._open if state.gpu.uuid not in self.kept]
            self._find_largest()

    def suitable(self, job: WaitingJob) -> list[_GpuState]:
        """Return the GPUs that it may have now, best first."""
        if job.need_bytes > self._largest:
            return []
        found = [state for state in self._open if state.suits(job)]
        if job.jobs_per_device > 1:
            # the tightest fit leaves room for large jobs
            return sorted(
                found, key=lambda state: (self._first_could(state), state.usable, _tie(state))
            )
        return sorted(
            found, key=lambda state: (self._first_could(state), -state.usable, _tie(state))
        )

    def _choose(self, job: WaitingJob) -> Sequence[_GpuState]:
        """Return all the GPUs that it needs, or none."""
        if len(self._open) < job.count:
            return ()
        found = self.suitable(job)
        if job.count == 1:
            return found[:1]
        apart = [state for state in found if not self._first_could(state)]
        for states in (apart, found):
            group = choose_group([state.gpu for state in states], job.count)
            if group:
                return [self._states[gpu.uuid] for gpu in group]
        return ()

    def _first_could(self, state: _GpuState) -> bool:
        first = self.first
        return (
            first is not None
            and state.gpu.uuid in first.only
            and could_ever_fit(state.gpu, first.need_bytes)
        )

    def _keep(self, job: WaitingJob) -> tuple[str, ...]:
        """Return as many as it needs at first, twice as many every five minutes, in the end all.

        None while too few are healthy: then others may use those that are. GPUs that this process
        cannot see may be healthy.
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

    def _find_largest(self) -> None:
        self._largest = max((state.usable for state in self._open), default=-1)


def _states(
    reservations: Collection[GpuReservation], gpus: Sequence[GpuInfo]
) -> dict[str, _GpuState]:
    by_gpu: dict[str, list[GpuReservation]] = {}
    shut = False
    for reservation in reservations:
        if reservation.gpu is None:
            shut = True  # it may be on any of them
        else:
            by_gpu.setdefault(reservation.gpu, []).append(reservation)
    return {gpu.uuid: _GpuState(gpu, by_gpu.get(gpu.uuid, ()), shut) for gpu in gpus}


def _outstanding(reservation: GpuReservation) -> int:
    return max(reservation.reserved_bytes - (reservation.taken_bytes or 0), 0)


def _in_use(reservation: GpuReservation, gpu: GpuInfo) -> int:
    """Return what will come back when it ends: without a report a guess, used for no grant."""
    if reservation.taken_bytes is not None:
        return reservation.taken_bytes
    return min(reservation.reserved_bytes, gpu.used_bytes)


def _tie(state: _GpuState) -> tuple[int, str, str]:
    busy = state.gpu.utilization_percent
    return (101 if busy is None else busy, state.gpu.pci_bus_id, state.gpu.uuid)


def _describe(state: _GpuState) -> str:
    gpu = state.gpu
    if gpu.unusable is not None:
        return f"{label(gpu)}: {gpu.unusable}"
    text = f"{label(gpu)} has {mib(gpu.free_bytes)} of {mib(gpu.total_bytes)} free"
    parts = [
        f"{mib(r.reserved_bytes)} reserved by job {r.id}"
        + (f" ({r.owner})" if r.owner else "")
        + (", which is leaving" if r.draining else "")
        for r in state.reservations
    ]
    others = gpu.used_bytes - sum(_in_use(r, gpu) for r in state.reservations)
    if others >= MIB:
        parts.append(f"{mib(others)} used by others")
    return text + (f": {', '.join(parts)}" if parts else "")
