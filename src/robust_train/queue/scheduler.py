"""Who gets which GPU now: one pure function over the line, the reservations and the GPUs.

The line is first come, first served. The first job that no GPU suits is its head, and the GPU that
will suit it first is held back for it: what others may take besides cannot make that one free any
later. So the head waits only for jobs that already run, then the next is head, and nobody waits for
ever. The longer it waits, the more GPUs are held back, since nobody knows which of them will be
free first. A job that passes takes a GPU that the head could not use, where there is one.

A job of several GPUs gets all of them in one decision or none, so nobody holds some while it waits
for others, and two such jobs cannot wait for each other. As many as it needs are held back for it.
It gets GPUs of one model where there are enough: all wait for the slowest at every step.

Memory that a newcomer can count on is what NVML says is free, less what reservations claim and have
not taken yet. What a job has taken is at least what it told; a job that told nothing has taken
nothing. Claims never add up to more than a GPU has.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from robust_train.gpu.select import choose_group, could_ever_fit, label, mib, needed
from robust_train.values import GpuInfo, Group

_GPUS_TOLD = 4
_DOUBLES_EVERY_SECONDS = 300.0


@dataclass(frozen=True)
class Waiter:
    """A job in line.

    Attributes:
        id: of the job.
        ticket: its place; lower goes first.
        need_bytes: free memory that it needs on each of its GPUs.
        only: UUIDs of the GPUs that it may use.
        jobs_per_device: how many jobs it suffers on a GPU of its own, itself included.
        queued_at: when it came, seconds.
        count: GPUs that it needs at once.
    """

    id: str
    ticket: int
    need_bytes: int
    only: frozenset[str]
    jobs_per_device: int = 1
    queued_at: float = 0.0
    count: int = 1


@dataclass(frozen=True)
class Holding:
    """A reservation on one GPU; a job of several GPUs has as many.

    Attributes:
        id: of the job.
        gpu: UUID of its GPU; None where its record cannot be read, so that it may be any.
        claim_bytes: what it may use there.
        taken_bytes: what it has allocated at least, None where not known.
        jobs_per_device: how many jobs it suffers on its GPU, itself included.
        since: when it came there, seconds.
        draining: its memory is on the way back.
        owner: for people, ``lora_flowers102, ada``.
        ticket: its place in line when it came.
    """

    id: str
    gpu: str | None
    claim_bytes: int
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
        head: the first job in line that gets nothing now, None if there is no such job.
        held_back: UUIDs of the GPUs that are kept for it, the one that suits it first in front;
            none where no end of a job could give it enough.
        awaited: of as many of these as it needs, those that do not suit it yet.
    """

    groups: Mapping[str, Group] = field(default_factory=dict)
    head: str | None = None
    held_back: tuple[str, ...] = ()
    awaited: tuple[str, ...] = ()

    @property
    def grants(self) -> dict[str, GpuInfo]:
        """The first GPU of each job that gets any: for a job of one GPU all there is to know."""
        return {id_: group[0] for id_, group in self.groups.items()}


def plan(
    waiters: Iterable[Waiter],
    holdings: Sequence[Holding],
    gpus: Sequence[GpuInfo],
    now: float = 0.0,
) -> Plan:
    """Who gets which GPU now.

    Args:
        waiters: the line, in any order; tickets decide.
        holdings: all reservations.
        gpus: the machine at this moment; unusable ones are not given.
        now: seconds, on the clock of ``queued_at``.
    """
    desk = _Desk(holdings, gpus, now)
    for waiter in sorted(waiters, key=lambda waiter: (waiter.ticket, waiter.id)):
        desk.serve(waiter)
    head = None if desk.head is None else desk.head.id
    return Plan(desk.groups, head, desk.held_back, desk.awaited)


def open_to(
    me: Waiter,
    waiters: Iterable[Waiter],
    holdings: Sequence[Holding],
    gpus: Sequence[GpuInfo],
    now: float = 0.0,
) -> tuple[GpuInfo, ...]:
    """The GPUs that a job may take now, after those who came before it; ``free_bytes`` as usable.

    Each of them suits by itself, so a job of several GPUs may take any of them together.

    Args:
        me: the job; it keeps the ticket that it once took, also while it runs.
        waiters: the line.
        holdings: the reservations of the others.
        gpus: the machine at this moment.
        now: seconds, on the clock of ``queued_at``.
    """
    desk = _Desk(holdings, gpus, now)
    for waiter in sorted(waiters, key=lambda waiter: (waiter.ticket, waiter.id)):
        if waiter.id != me.id and waiter.ticket < me.ticket:
            desk.serve(waiter)
    return tuple(room.as_gpu() for room in desk.suitable(me))


def why_not(waiter: Waiter, holdings: Sequence[Holding], gpus: Sequence[GpuInfo], now: Plan) -> str:
    """Why a job gets none of its GPUs, in one sentence."""
    parts = []
    hidden = [holding.id for holding in holdings if holding.gpu is None]
    if hidden:
        parts.append(f"the record of job {', '.join(hidden)} cannot be read")
    rooms = _rooms(holdings, gpus)
    mine = [room for room in rooms.values() if room.gpu.uuid in waiter.only]
    kept = () if now.head in (None, waiter.id) else now.held_back
    for room in mine[:_GPUS_TOLD]:
        told = _told(room)
        if room.gpu.uuid in kept:
            told += f", and is kept for job {now.head}, which came earlier"
        parts.append(told)
    if len(mine) > _GPUS_TOLD:
        parts.append(f"and {len(mine) - _GPUS_TOLD} more")
    need = f"needs {needed(waiter.need_bytes, waiter.count)}"
    if waiter.count > 1:
        could = sum(room.suits(waiter) and room.gpu.uuid not in kept for room in mine)
        need += f", {could} could be had now"
    return f"{need}; {'; '.join(parts) or 'none of its GPUs is there'}"


class _Room:
    """What one GPU still has to give."""

    def __init__(self, gpu: GpuInfo, holdings: Sequence[Holding], shut: bool) -> None:
        self.gpu = gpu
        self.holdings = holdings
        self.count = len(holdings)
        most = 1 if gpu.compute_mode.startswith("exclusive") else 1 << 30
        self.limit = min([most, *(holding.jobs_per_device for holding in holdings)])
        if shut or gpu.unusable is not None:
            self.limit = 0
        outstanding = sum(_outstanding(holding) for holding in holdings)
        committed = sum(max(h.claim_bytes, h.taken_bytes or 0) for h in holdings)
        self.usable = min(gpu.free_bytes - outstanding, gpu.total_bytes - committed)

    def suits(self, waiter: Waiter) -> bool:
        return (
            self.usable >= waiter.need_bytes
            and self.count < min(self.limit, waiter.jobs_per_device)
            and self.gpu.uuid in waiter.only
        )

    def take(self, waiter: Waiter) -> None:
        self.usable -= waiter.need_bytes
        self.count += 1
        self.limit = min(self.limit, waiter.jobs_per_device)

    def is_sick(self) -> bool:
        """Whether no end of a job makes it usable; in exclusive mode that of its owner's does."""
        return self.gpu.unusable is not None and not self.gpu.compute_mode.startswith("exclusive")

    def as_gpu(self) -> GpuInfo:
        return replace(self.gpu, free_bytes=max(self.usable, 0))

    def distance(self, waiter: Waiter) -> tuple[bool, bool, float, int, int, float, str]:
        """How far off its turn is here, nearest first.

        Strangers end nobody knows when, our jobs do; then by who passed it, see :meth:`_passed`;
        then by what is missing, then who began first.
        """
        ours = sum(_in_use(holding, self.gpu) for holding in self.holdings)
        by_strangers = min(self.gpu.free_bytes + ours, self.gpu.total_bytes) < waiter.need_bytes
        slots = self.count - min(self.limit or waiter.jobs_per_device, waiter.jobs_per_device) + 1
        began = min((0.0 if h.draining else h.since for h in self.holdings), default=0.0)
        return (
            by_strangers,
            self.gpu.unusable is not None,
            self._passed(waiter),
            max(waiter.need_bytes - self.usable, 0),
            max(slots, 0),
            began,
            self.gpu.pci_bus_id + self.gpu.uuid,
        )

    def _passed(self, waiter: Waiter) -> float:
        """When somebody last took a place here that is in the way of one who came earlier, or 0.

        A GPU that is held back gets nobody who passes, so it stays among those with the smallest
        values until another one's is smaller still: on the GPUs that are held back for the head of
        the line nobody is in its way who passed it there.
        """
        later = [h for h in self.holdings if h.ticket > waiter.ticket]
        if not later:
            return 0.0
        fits = sum(h.claim_bytes for h in later) + waiter.need_bytes <= self.gpu.total_bytes
        slots = len(later) < min(waiter.jobs_per_device, *(h.jobs_per_device for h in later))
        return 0.0 if fits and slots else max(h.since for h in later)


class _Desk:
    """Serves one waiter after the other; what it gave is gone for the next."""

    def __init__(self, holdings: Sequence[Holding], gpus: Sequence[GpuInfo], now: float) -> None:
        self._now = now
        self._rooms = _rooms(holdings, gpus)
        self._open = [room for room in self._rooms.values() if room.count < room.limit]
        self._find_largest()
        self.groups: dict[str, Group] = {}
        self.head: Waiter | None = None
        self.held_back: tuple[str, ...] = ()
        self.awaited: tuple[str, ...] = ()

    def serve(self, waiter: Waiter) -> None:
        group = self._choose(waiter)
        if group:
            self.groups[waiter.id] = tuple(room.as_gpu() for room in group)
            for room in group:
                room.take(waiter)
                if room.count >= room.limit:
                    self._open.remove(room)
            self._find_largest()
        elif self.head is None:
            self.head = waiter
            self.held_back = self._hold_back(waiter)
            nearest = self.held_back[: waiter.count]
            self.awaited = tuple(uuid for uuid in nearest if not self._rooms[uuid].suits(waiter))
            self._open = [room for room in self._open if room.gpu.uuid not in self.held_back]
            self._find_largest()

    def suitable(self, waiter: Waiter) -> list[_Room]:
        """The GPUs that it may have now, best first."""
        if waiter.need_bytes > self._largest:
            return []
        found = [room for room in self._open if room.suits(waiter)]
        if waiter.jobs_per_device > 1:
            # the tightest fit leaves room for large jobs
            return sorted(found, key=lambda room: (self._head_could(room), room.usable, _tie(room)))
        return sorted(found, key=lambda room: (self._head_could(room), -room.usable, _tie(room)))

    def _choose(self, waiter: Waiter) -> Sequence[_Room]:
        """All the GPUs that it needs, or none."""
        if len(self._open) < waiter.count:
            return ()
        found = self.suitable(waiter)
        if waiter.count == 1:
            return found[:1]
        apart = [room for room in found if not self._head_could(room)]
        for rooms in (apart, found):
            group = choose_group([room.gpu for room in rooms], waiter.count)
            if group:
                return [self._rooms[gpu.uuid] for gpu in group]
        return ()

    def _head_could(self, room: _Room) -> bool:
        head = self.head
        return (
            head is not None
            and room.gpu.uuid in head.only
            and could_ever_fit(room.gpu, head.need_bytes)
        )

    def _hold_back(self, waiter: Waiter) -> tuple[str, ...]:
        """As many as it needs at first, twice as many every five minutes, in the end all.

        None while too few are well: then others may as well use those that are. GPUs that this
        process cannot see may be well.
        """
        possible = [
            room
            for room in self._rooms.values()
            if room.gpu.uuid in waiter.only and could_ever_fit(room.gpu, waiter.need_bytes)
        ]
        unseen = len(waiter.only - self._rooms.keys())
        if sum(not room.is_sick() for room in possible) + unseen < waiter.count:
            return ()
        doublings = max(self._now - waiter.queued_at, 0.0) / _DOUBLES_EVERY_SECONDS
        count = waiter.count << min(int(doublings), 20)
        nearest = heapq.nsmallest(count, possible, key=lambda room: room.distance(waiter))
        return tuple(room.gpu.uuid for room in nearest)

    def _find_largest(self) -> None:
        self._largest = max((room.usable for room in self._open), default=-1)


def _rooms(holdings: Collection[Holding], gpus: Sequence[GpuInfo]) -> dict[str, _Room]:
    by_gpu: dict[str, list[Holding]] = {}
    shut = False
    for holding in holdings:
        if holding.gpu is None:
            shut = True  # it may be on any of them
        else:
            by_gpu.setdefault(holding.gpu, []).append(holding)
    return {gpu.uuid: _Room(gpu, by_gpu.get(gpu.uuid, ()), shut) for gpu in gpus}


def _outstanding(holding: Holding) -> int:
    return max(holding.claim_bytes - (holding.taken_bytes or 0), 0)


def _in_use(holding: Holding, gpu: GpuInfo) -> int:
    """What will come back when it ends; a guess where it told nothing, and used for no grant."""
    if holding.taken_bytes is not None:
        return holding.taken_bytes
    return min(holding.claim_bytes, gpu.used_bytes)


def _tie(room: _Room) -> tuple[int, str, str]:
    busy = room.gpu.utilization_percent
    return (101 if busy is None else busy, room.gpu.pci_bus_id, room.gpu.uuid)


def _told(room: _Room) -> str:
    gpu = room.gpu
    if gpu.unusable is not None:
        return f"{label(gpu)}: {gpu.unusable}"
    told = f"{label(gpu)} has {mib(gpu.free_bytes)} of {mib(gpu.total_bytes)} free"
    parts = [
        f"{mib(holding.claim_bytes)} reserved by job {holding.id}"
        + (f" ({holding.owner})" if holding.owner else "")
        + (", which is leaving" if holding.draining else "")
        for holding in room.holdings
    ]
    strangers = gpu.used_bytes - sum(_in_use(holding, gpu) for holding in room.holdings)
    if strangers >= 1024**2:
        parts.append(f"{mib(strangers)} used by others")
    return told + (f": {', '.join(parts)}" if parts else "")
