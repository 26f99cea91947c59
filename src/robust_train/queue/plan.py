"""Decide which job gets which GPUs now, and explain why the others wait. Pure.

Each launcher uses it to decide for its own job, and ``robust-train queue`` to explain. GPUs are
kept for the first job that no free GPU suits, and others may overtake it on other GPUs.
``docs/decisions/0006-a-reservation-is-a-lock.md`` gives the rules and their reasons.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from robust_train.gpu.processes import GpuUser, user_name
from robust_train.gpu.select import (
    choose_group,
    could_ever_fit,
    describe_process,
    label,
    tie_breaker,
)
from robust_train.model.gpu import GpuInfo, Group
from robust_train.queue.queue_dir import NO_LIMIT
from robust_train.queue.registry import QueuedJob
from robust_train.readable import MIB, mib, shorten

LONGEST = 120
"""The longest reason, in characters."""
_DOUBLES_EVERY_SECONDS = 300.0


class Plan:
    """The GPUs of each waiting job. Jobs are served in turn, and take GPUs from the jobs behind.

    Attributes:
        order: all waiting jobs, in the order of service.
        groups: the GPUs that a job gets, by its id, best first, with the usable memory as
            ``free_bytes``.
        first: the id of the first job in the queue that gets nothing now, empty if all get GPUs.
        kept: UUIDs of the GPUs kept for it, the GPU that suits it soonest in front.
        capped: why jobs get nothing because of ``max_gpus_per_user``, by id.
    """

    def __init__(
        self,
        jobs: Iterable[QueuedJob],  # all living jobs
        # All GPUs of the host. Unusable GPUs are not granted.
        gpus: Sequence[GpuInfo],
        now: float,  # seconds of the host's monotonic clock
        gpu_limit: int = NO_LIMIT,  # the most GPUs that a user may hold
        *,
        until: str = "",  # the id of a job: only the jobs before it are served
    ) -> None:
        jobs = list(jobs)
        self.order = queue_order(jobs)
        self.groups: dict[str, Group] = {}
        self.capped: dict[str, str] = {}
        self.kept: tuple[str, ...] = ()
        self._first: QueuedJob | None = None
        self._now = now
        self._limit = gpu_limit
        self._held = _held(jobs)
        self._states = gpu_states(jobs, gpus)
        for job in self.order:
            if job.id == until:
                break
            if job.is_polling(now):
                self._serve(job)

    @property
    def first(self) -> str:
        return "" if self._first is None else self._first.id

    def _serve(self, job: QueuedJob) -> None:
        """Grant the job its GPUs, or keep some for it if it is the first that gets none."""
        held = self._held[job.owner]
        group = self._choose(job)
        if group:
            self.groups[job.id] = tuple(state.as_gpu() for state in group)
            for state in group:
                state.take(job)
            held.update(state.gpu.uuid for state in group)
        elif self._is_capped(job):
            self.capped[job.id] = (
                f"{user_name(job.owner)} holds {len(held)} of at most {self._limit} GPUs "
                "(max_gpus_per_user)"
            )
        elif self._first is None:
            self._first = job
            self.kept = self._keep(job)

    def suitable(self, job: QueuedJob) -> list[GpuState]:
        """Return the GPUs that the job may have now, best first."""
        states = [
            state
            for state in self._states.values()
            if state.suits(job) and state.gpu.uuid not in self.kept
        ]
        if self._is_capped(job):  # the job may only share GPUs that its user holds
            held = self._held[job.owner]
            states = [state for state in states if state.gpu.uuid in held]
        # a tight fit leaves room for large jobs
        fullest = 1 if job.jobs_per_device > 1 else -1
        return sorted(
            states,
            key=lambda state: (
                self._first_could(state),
                fullest * state.usable,
                tie_breaker(state.gpu),
            ),
        )

    def _is_capped(self, job: QueuedJob) -> bool:
        """Return whether the user of the job would hold more GPUs than allowed."""
        return len(self._held[job.owner]) + job.count > self._limit

    def _choose(self, job: QueuedJob) -> Sequence[GpuState]:
        """Return as many GPUs as the job needs, or none."""
        suitable = self.suitable(job)
        apart = [state for state in suitable if not self._first_could(state)]
        for states in (apart, suitable):
            group = choose_group([state.gpu for state in states], job.count)
            if group:
                return [self._states[gpu.uuid] for gpu in group]
        return ()

    def _first_could(self, state: GpuState) -> bool:
        """Return whether the first waiting job could ever use the GPU, so others are preferred."""
        return self._first is not None and state.could_ever_suit(self._first)

    def _keep(self, job: QueuedJob) -> tuple[str, ...]:
        """Return the GPUs to keep: as many as it needs, doubling every five minutes up to all.

        Empty while too few are healthy. GPUs that this process cannot see count as healthy.
        """
        possible = [state for state in self._states.values() if state.could_ever_suit(job)]
        # GPUs that are usable, or will be once the processes on them end
        healthy = sum(state.gpu.unusable is None or state.gpu.owned for state in possible)
        unseen = len(set(job.only) - self._states.keys())
        if healthy + unseen < job.count:
            return ()
        # a job that waits again has trained since it was first queued
        waits_since = max(job.queued_at, job.since)
        doublings = max(self._now - waits_since, 0.0) / _DOUBLES_EVERY_SECONDS
        count = job.count << min(int(doublings), 20)
        nearest = sorted(possible, key=lambda state: state.distance(job))
        return tuple(state.gpu.uuid for state in nearest[:count])


def open_to(
    me: QueuedJob,
    others: Iterable[QueuedJob],
    gpus: Sequence[GpuInfo],
    now: float,
    gpu_limit: int = NO_LIMIT,
) -> tuple[GpuInfo, ...]:
    """Return the GPUs that a job may take now, with the usable memory as ``free_bytes``.

    The jobs before it are served first. A job of several GPUs may take any of them. Its own memory
    counts as free.
    """
    me = me.on((), polled_at=now)
    before = Plan([*others, me], gpus, now, gpu_limit, until=me.id)
    return tuple(state.as_gpu() for state in before.suitable(me))


def waits_for(
    me: QueuedJob,
    others: Iterable[QueuedJob],
    gpus: Sequence[GpuInfo],
    now: float,
    gpu_limit: int = NO_LIMIT,
) -> QueuedJob | None:
    """Return the first waiting job if a GPU of this job is kept for it, and its user holds fewer
    GPUs than this job's user."""
    jobs = [*others, me]
    decided = Plan(jobs, gpus, now, gpu_limit)
    held = _held(jobs)
    first = next((job for job in jobs if job.id == decided.first), None)
    if first is None or not set(decided.kept) & set(me.gpus):
        return None
    return first if len(held[first.owner]) < len(held[me.owner]) else None


def has_room(
    me: QueuedJob, others: Iterable[QueuedJob], gpus: Sequence[GpuInfo], gpu_limit: int = NO_LIMIT
) -> bool:
    """Return whether the GPUs that a job has announced have room for it beside all other jobs."""
    others = list(others)
    states = gpu_states(others, gpus)
    held = _held(others)[me.owner]
    wanted = set(me.gpus)
    if not wanted <= held and len(held | wanted) > gpu_limit:
        return False
    return all(uuid in states and states[uuid].suits(me) for uuid in me.gpus)


def room_on_own_gpus(
    me: QueuedJob, others: Iterable[QueuedJob], gpus: Sequence[GpuInfo]
) -> int | None:
    """Return the bytes that a running job may reserve on each of its GPUs next to all other jobs,
    including its own memory. None if any of its GPUs is not among ``gpus``."""
    taken = dict(zip(me.gpus, me.taken_bytes, strict=True))
    its_gpus = [
        replace(gpu, free_bytes=gpu.free_bytes + (taken[gpu.uuid] or 0))
        for gpu in gpus
        if gpu.uuid in taken
    ]
    if len(its_gpus) < len(taken):
        return None
    states = gpu_states(others, its_gpus)
    return min((max(states[uuid].usable, 0) for uuid in taken), default=None)


def queue_order(jobs: Iterable[QueuedJob]) -> list[QueuedJob]:
    """Return the waiting jobs in the order in which they are served.

    The user who holds fewer GPUs goes first, counting jobs that are already in the order. Then the
    earlier job goes first. Among the jobs of a user, urgent jobs go first, and then earlier jobs:
    they change places only with each other.
    """
    jobs = list(jobs)
    held = {user: len(gpus) for user, gpus in _held(jobs).items()}
    queues: defaultdict[int, list[QueuedJob]] = defaultdict(list)
    for job in sorted(jobs, key=lambda job: job.order):
        if not job.gpus:
            queues[job.owner].append(job)
    # Each user's jobs by urgency. They fill the places of that user's jobs in `queues`.
    urgent = {user: sorted(queue, key=lambda job: -job.urgency) for user, queue in queues.items()}
    ordered: list[QueuedJob] = []
    while any(queues.values()):
        users = (user for user in queues if queues[user])
        user = min(users, key=lambda user: (held[user], queues[user][0].order))
        del queues[user][0]
        ordered.append(urgent[user].pop(0))
        held[user] += ordered[-1].count
    return ordered


def _held(jobs: Iterable[QueuedJob]) -> defaultdict[int, set[str]]:
    """Return the UUIDs of the GPUs that each user holds."""
    held: defaultdict[int, set[str]] = defaultdict(set)
    for job in jobs:
        held[job.owner].update(job.gpus)
    return held


class GpuState:
    """One GPU, its jobs, and the room that is left on it."""

    def __init__(self, gpu: GpuInfo, jobs: Sequence[QueuedJob]) -> None:
        self.gpu = gpu
        self.jobs = jobs
        self.count = len(jobs)
        most = 1 if self.is_exclusive() else NO_LIMIT
        self.limit = min([most, *(job.jobs_per_device for job in jobs)])
        if gpu.unusable is not None:
            self.limit = 0
        # NVML's free memory, minus what is reserved and not allocated yet. The total limits it, so
        # that all reservations together never exceed the GPU.
        taken = sum(self.taken(job) for job in jobs)
        committed = sum(max(job.reserved_bytes, self.taken(job)) for job in jobs)
        self.usable = min(gpu.free_bytes + taken, gpu.total_bytes) - committed

    def taken(self, job: QueuedJob) -> int:
        """Return how much memory a job has allocated here at least, 0 if unknown."""
        return job.taken_bytes[job.gpus.index(self.gpu.uuid)] or 0

    def most(self, job: QueuedJob) -> int:
        """Return how many jobs could share the GPU, including this job."""
        return min(self.limit, job.jobs_per_device)

    def suits(self, job: QueuedJob) -> bool:
        """Return whether the job could start here now."""
        has_room = self.usable >= job.reserved_bytes and self.count < self.most(job)
        return has_room and self.gpu.uuid in job.only

    def could_ever_suit(self, job: QueuedJob) -> bool:
        """Return whether the job could start here if all others ended."""
        is_allowed = self.gpu.uuid in job.only
        return is_allowed and could_ever_fit(self.gpu, job.reserved_bytes)

    def take(self, job: QueuedJob) -> None:
        """Let the job start here."""
        self.usable -= job.reserved_bytes
        self.count += 1
        self.limit = self.most(job)

    def is_exclusive(self) -> bool:
        """Return whether the GPU's compute mode allows only a single process."""
        return self.gpu.compute_mode.startswith("exclusive") and not self.gpu.mps

    def as_gpu(self) -> GpuInfo:
        """Return the GPU with the memory that a new job can count on as free."""
        return replace(self.gpu, free_bytes=max(self.usable, 0))

    def in_use(self) -> int:
        """Estimate the memory that will be free when its jobs end. This never grants a GPU."""
        most = self.gpu.used_bytes
        total = 0
        for job in self.jobs:
            taken = self.taken(job)
            total += taken if taken else min(job.reserved_bytes, most)
        return total

    def distance(self, job: QueuedJob) -> tuple[Any, ...]:
        """Return a sort key that puts the GPU first that suits the job soonest.

        Programs outside of the queue end at an unknown time, so they count most. Then come jobs
        that overtook this job there, the missing memory, and the start of the first job there.
        """
        after = min(self.gpu.free_bytes + self.in_use(), self.gpu.total_bytes)
        most = self.most(job) or job.jobs_per_device
        began = [0.0 if other.draining else other.since for other in self.jobs]
        return (
            after < job.reserved_bytes,
            self.gpu.unusable is not None,
            self._overtaken_at(job),
            max(job.reserved_bytes - self.usable, 0),
            max(self.count - most + 1, 0),
            min(began, default=0.0),
            self.gpu.pci_bus_id,
            self.gpu.uuid,
        )

    def _overtaken_at(self, job: QueuedJob) -> float:
        """Return when the newest later job that is in the way started here, or 0 if none is.

        This keeps the set of kept GPUs stable, because a kept GPU does not get such a job.
        """
        later = [later_job for later_job in self.jobs if later_job.ticket > job.ticket]
        room = self.gpu.total_bytes - sum(later_job.reserved_bytes for later_job in later)
        most = min((later_job.jobs_per_device for later_job in later), default=job.jobs_per_device)
        if room >= job.reserved_bytes and len(later) < min(most, job.jobs_per_device):
            return 0.0
        return max((later_job.since for later_job in later), default=0.0)


def gpu_states(jobs: Iterable[QueuedJob], gpus: Sequence[GpuInfo]) -> dict[str, GpuState]:
    """Return each GPU's state by its UUID."""
    by_gpu: defaultdict[str, list[QueuedJob]] = defaultdict(list)
    for job in jobs:
        for uuid in job.gpus:
            by_gpu[uuid].append(job)
    return {gpu.uuid: GpuState(gpu, by_gpu[gpu.uuid]) for gpu in gpus}


# --- reasons for people ----------------------------------------------------------------------


def who_goes_first(job: QueuedJob, order: Sequence[QueuedJob]) -> str:
    """Return why a later job goes first, or an empty text if none does."""
    for other in order[: order.index(job)]:
        if other.owner == job.owner and other.urgency > job.urgency:
            return f"job {other.shown_id} goes first: its queue_priority is higher"
        if other.owner != job.owner and other.order > job.order:
            user = user_name(other.owner)
            return f"job {other.shown_id} of {user} goes first: {user} holds fewer GPUs"
    return ""


def why_waiting(
    job: QueuedJob,
    others: Iterable[QueuedJob],
    gpus: Sequence[GpuInfo],
    decided: Plan,
    holders: Mapping[int, GpuUser],
) -> str:
    """Return why a job gets no GPU now: at most 120 characters, the nearest obstacle first.

    ``holders`` names processes on the GPUs, as far as those were listed.
    """
    if job.id in decided.capped:
        return shorten(decided.capped[job.id], LONGEST)
    promised = {gpu.uuid: id_ for id_, group in decided.groups.items() for gpu in group}
    promised |= dict.fromkeys(decided.kept, decided.first)
    shown_ids = {waiting.id: waiting.shown_id for waiting in decided.order}
    by_obstacle: defaultdict[tuple[int, str], list[GpuState]] = defaultdict(list)
    for state in gpu_states(others, gpus).values():
        if state.gpu.uuid in job.only:
            promised_to = promised.get(state.gpu.uuid, job.id)
            kept_for = None
            if promised_to != job.id:
                kept_for = shown_ids[promised_to]
            by_obstacle[_obstacle(state, job, kept_for)].append(state)
    available = len(by_obstacle.pop(_NONE, ()))
    awaited = decided.kept[: job.count] if decided.first == job.id else ()

    nearest = sorted(
        by_obstacle.items(),
        key=lambda item: (not any(state.gpu.uuid in awaited for state in item[1]), item[0][0]),
    )
    parts = [_sentence(text, states, job, holders) for (_, text), states in nearest]
    if job.count > 1:
        parts.insert(0, f"{available} of {job.count} GPUs available")
    nothing = "its driver shows none of its GPUs"
    if available:
        nothing = "another job took its GPU at the same moment"
    return shorten("; ".join(parts) or nothing, LONGEST)


_NONE = 0, ""


def _obstacle(state: GpuState, job: QueuedJob, kept_for: str | None) -> tuple[int, str]:
    """Return how far away a GPU is, for sorting, and why, or ``_NONE`` if the job could have it."""
    if state.gpu.unusable is not None:
        return 4, state.gpu.unusable
    most = state.most(job)
    if state.count >= most:
        jobs = "one job" if most == 1 else f"{most} jobs"
        if state.is_exclusive():
            return 1, "taken, and its compute mode allows one process"
        of_them = " of the job there" if most < job.jobs_per_device else ""
        return (1, f"taken, {jobs} per GPU (gpu_jobs_per_device={most}{of_them})")
    if state.usable < job.reserved_bytes:
        is_ours = state.gpu.free_bytes + state.in_use() >= job.reserved_bytes
        return (2, "ours") if is_ours else (3, "others")
    if kept_for is not None:
        return 0, f"kept for job {kept_for}, which is ahead in the queue"
    return _NONE


def _sentence(
    text: str, states: Sequence[GpuState], job: QueuedJob, holders: Mapping[int, GpuUser]
) -> str:
    numbers = ", ".join(dict.fromkeys(str(state.gpu.index) for state in states))
    if text in ("ours", "others"):
        usable = max(max(state.usable for state in states), 0)
        most = "at most " if len(states) > 1 else ""
        text = f"{most}{usable // MIB} of {mib(job.reserved_bytes)} free"
        jobs = dict.fromkeys(other.shown_id for state in states for other in state.jobs)
        processes = [process for state in states for process in state.gpu.processes or ()]
        if jobs:
            text += f" beside job {', '.join(jobs)}"
        elif processes:
            largest = max(processes, key=lambda process: process.used_bytes or 0)
            text += f", {describe_process(largest, holders)}"
    gpus = "GPUs" if len(states) > 1 else "GPU"
    return f"{gpus} {numbers}: {text}"


def describe(jobs: Iterable[QueuedJob], gpus: Sequence[GpuInfo]) -> list[str]:
    """Return a line for each GPU: how much is free, and who has how much."""
    lines = []
    for state in gpu_states(jobs, gpus).values():
        gpu = state.gpu
        free = f"{mib(gpu.free_bytes)} of {mib(gpu.total_bytes)} free"
        parts = [gpu.unusable or free]
        for job in state.jobs:
            who = f"{job.name}, {user_name(job.owner)}"
            leaving = ", which is leaving" * job.draining
            parts.append(
                f"{mib(job.reserved_bytes)} reserved by job {job.shown_id} ({who}){leaving}"
            )
        others = gpu.used_bytes - state.in_use()
        if others >= MIB:
            parts.append(f"{mib(others)} used by others")
        lines.append(f"{label(gpu)}: {', '.join(parts)}")
    return lines
