"""Decides which waiting job gets which GPUs now, and explains why the other jobs wait. Pure.

There is no scheduler process: each launcher computes the same :class:`Plan` from all records and
takes the GPUs that the plan gives to its own job. ``robust-train queue`` uses it for explanations.
Jobs are served in queue order. If no GPU suits the first job, GPUs are kept for it, and later jobs
may overtake it only on other GPUs. ``docs/decisions/0006-a-reservation-is-a-lock.md`` gives the
rules and their reasons.
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

# The longest reason, in characters.
LONGEST = 120
# The number of GPUs that are kept for the first job doubles each time it has waited this long.
_DOUBLES_EVERY_SECONDS = 300.0


class Plan:
    """The GPUs that each waiting job gets now.

    Attributes:
        order: all waiting jobs, in the order in which they are served.
        groups: the GPUs that a job gets, by the job's id, best first, with the usable memory as
            ``free_bytes``.
        first: the id of the first job in the queue that gets no GPU, empty if all jobs get GPUs.
        kept: UUIDs of the GPUs that are kept for that job, the GPU that suits it soonest first.
        capped: the messages for jobs that get no GPU because of ``max_gpus_per_user``, by id.
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
        self._held = _group_by_holder(jobs)
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
        """Give the job its GPUs. If it is the first job that gets no GPU, keep GPUs for it."""
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
        """Return the GPUs that the job may take now, best first."""
        states = [
            state
            for state in self._states.values()
            if state.suits(job) and state.gpu.uuid not in self.kept
        ]
        if self._is_capped(job):  # the job may only share GPUs that its user holds
            held = self._held[job.owner]
            states = [state for state in states if state.gpu.uuid in held]
        # A job that shares its GPU goes where it fits most tightly, which leaves room for large
        # jobs. A job that wants a GPU to itself prefers the GPU with the most memory.
        sign = 1 if job.jobs_per_device > 1 else -1

        def rank(state: GpuState) -> tuple[Any, ...]:
            return self._suits_first(state), sign * state.usable, tie_breaker(state.gpu)

        return sorted(states, key=rank)

    def _is_capped(self, job: QueuedJob) -> bool:
        """Return whether the user of the job would hold more GPUs than allowed."""
        return len(self._held[job.owner]) + job.count > self._limit

    def _choose(self, job: QueuedJob) -> Sequence[GpuState]:
        """Return as many GPUs as the job needs, or no GPU if too few are suitable.

        GPUs that the first waiting job cannot use are preferred.
        """
        suitable = self.suitable(job)
        unsuitable_for_first = [state for state in suitable if not self._suits_first(state)]
        for states in (unsuitable_for_first, suitable):
            group = choose_group([state.gpu for state in states], job.count)
            if group:
                return [self._states[gpu.uuid] for gpu in group]
        return ()

    def _suits_first(self, state: GpuState) -> bool:
        """Return whether the first waiting job could ever use the GPU."""
        return self._first is not None and state.could_ever_suit(self._first)

    def _keep(self, job: QueuedJob) -> tuple[str, ...]:
        """Return the GPUs to keep for the first job that gets no GPU.

        Their number is the number that the job needs, and doubles every five minutes. No GPU is
        kept while too few GPUs are healthy. A GPU that this process cannot see counts as healthy.
        """
        possible = [state for state in self._states.values() if state.could_ever_suit(job)]
        # A GPU with an owner becomes usable once the processes on it end.
        healthy = [state for state in possible if state.gpu.unusable is None or state.gpu.owned]
        unseen = set(job.only) - self._states.keys()
        if len(healthy) + len(unseen) < job.count:
            return ()
        # A job that waits again has trained since it first entered the queue.
        waits_since = max(job.queued_at, job.since)
        doublings = max(self._now - waits_since, 0.0) / _DOUBLES_EVERY_SECONDS
        count = job.count << min(int(doublings), 20)
        nearest = sorted(possible, key=lambda state: state.distance(job))
        return tuple(state.gpu.uuid for state in nearest[:count])


def find_open_gpus(
    me: QueuedJob,
    others: Iterable[QueuedJob],
    gpus: Sequence[GpuInfo],
    now: float,
    gpu_limit: int = NO_LIMIT,
) -> tuple[GpuInfo, ...]:
    """Return the GPUs that a job may take now, with the usable memory as ``free_bytes``.

    The jobs before it in the queue are served first. The job's own memory counts as free. A job
    that needs several GPUs may take any of the returned GPUs.
    """
    me = me.on((), polled_at=now)
    plan = Plan([*others, me], gpus, now, gpu_limit, until=me.id)
    return tuple(state.as_gpu() for state in plan.suitable(me))


def find_job_to_yield_to(
    me: QueuedJob,
    others: Iterable[QueuedJob],
    gpus: Sequence[GpuInfo],
    now: float,
    gpu_limit: int = NO_LIMIT,
) -> QueuedJob | None:
    """Return the first waiting job if this job should release its GPUs for it.

    That is so if a GPU of this job is kept for the waiting job, whose user holds fewer GPUs.
    """
    jobs = [*others, me]
    plan = Plan(jobs, gpus, now, gpu_limit)
    if not set(plan.kept) & set(me.gpus):
        return None
    held = _group_by_holder(jobs)
    for job in jobs:
        if job.id == plan.first and len(held[job.owner]) < len(held[me.owner]):
            return job
    return None


def has_room(
    me: QueuedJob, others: Iterable[QueuedJob], gpus: Sequence[GpuInfo], gpu_limit: int = NO_LIMIT
) -> bool:
    """Return whether the GPUs that a job has announced have room for it next to all other jobs."""
    others = list(others)
    states = gpu_states(others, gpus)
    held = _group_by_holder(others)[me.owner]
    wanted = set(me.gpus)
    if not wanted <= held and len(held | wanted) > gpu_limit:
        return False
    return all(uuid in states and states[uuid].suits(me) for uuid in me.gpus)


def room_on_own_gpus(
    me: QueuedJob, others: Iterable[QueuedJob], gpus: Sequence[GpuInfo]
) -> int | None:
    """Return the bytes that a running job may reserve on each of its GPUs.

    This includes the memory that the job has taken already. None if any of its GPUs is missing in
    ``gpus``.
    """
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

    The user who holds fewer GPUs goes first, counting the jobs that are already in the order. Of
    users with equally many GPUs, the user with the earlier job goes first. A user's urgent jobs
    change places with that user's other jobs, and never with jobs of other users.
    """
    jobs = list(jobs)
    held = {user: len(gpus) for user, gpus in _group_by_holder(jobs).items()}
    queues: defaultdict[int, list[QueuedJob]] = defaultdict(list)
    for job in sorted(jobs, key=lambda job: job.order):
        if not job.gpus:
            queues[job.owner].append(job)
    # `queues` decides which user is next, and `by_urgency` which of that user's jobs.
    by_urgency = {
        user: sorted(queue, key=lambda job: -job.urgency) for user, queue in queues.items()
    }
    ordered: list[QueuedJob] = []
    while any(queues.values()):
        users = [user for user in queues if queues[user]]
        user = min(users, key=lambda user: (held[user], queues[user][0].order))
        del queues[user][0]
        job = by_urgency[user].pop(0)
        ordered.append(job)
        held[user] += job.count
    return ordered


def _group_by_holder(jobs: Iterable[QueuedJob]) -> defaultdict[int, set[str]]:
    """Return the UUIDs of the GPUs that each user holds."""
    held: defaultdict[int, set[str]] = defaultdict(set)
    for job in jobs:
        held[job.owner].update(job.gpus)
    return held


class GpuState:
    """One GPU, the jobs that hold it, and the room that is left on it.

    Attributes:
        gpu: the GPU.
        jobs: the jobs that hold it.
        count: number of jobs on it, including jobs that the plan has put there.
        limit: maximum number of jobs that may share it.
        usable: bytes that a new job can rely on, negative if too much is reserved.
    """

    def __init__(self, gpu: GpuInfo, jobs: Sequence[QueuedJob]) -> None:
        self.gpu = gpu
        self.jobs = jobs
        self.count = len(jobs)
        most = 1 if self.is_exclusive() else NO_LIMIT
        self.limit = min([most, *(job.jobs_per_device for job in jobs)])
        if gpu.unusable is not None:
            self.limit = 0
        # NVML's free memory, minus the memory that is reserved but not allocated yet. The total
        # limits the sum, so that all reservations together never exceed the GPU's memory.
        taken = sum(self.taken(job) for job in jobs)
        committed = sum(max(job.reserved_bytes, self.taken(job)) for job in jobs)
        self.usable = min(gpu.free_bytes + taken, gpu.total_bytes) - committed

    def taken(self, job: QueuedJob) -> int:
        """Return the memory that a job has allocated on the GPU at least, 0 if unknown."""
        return job.taken_bytes[job.gpus.index(self.gpu.uuid)] or 0

    def most(self, job: QueuedJob) -> int:
        """Return the maximum number of jobs on the GPU, if this job is one of them."""
        return min(self.limit, job.jobs_per_device)

    def suits(self, job: QueuedJob) -> bool:
        """Return whether the job could start on the GPU now."""
        has_room = self.usable >= job.reserved_bytes and self.count < self.most(job)
        return has_room and self.gpu.uuid in job.only

    def could_ever_suit(self, job: QueuedJob) -> bool:
        """Return whether the job could start on the GPU if all other jobs ended."""
        is_allowed = self.gpu.uuid in job.only
        return is_allowed and could_ever_fit(self.gpu, job.reserved_bytes)

    def take(self, job: QueuedJob) -> None:
        """Count the job as started on the GPU."""
        self.usable -= job.reserved_bytes
        self.count += 1
        self.limit = self.most(job)

    def is_exclusive(self) -> bool:
        """Return whether the GPU's compute mode allows only a single process."""
        return self.gpu.compute_mode.startswith("exclusive") and not self.gpu.mps

    def as_gpu(self) -> GpuInfo:
        """Return the GPU, with the memory that a new job can rely on as its free memory."""
        return replace(self.gpu, free_bytes=max(self.usable, 0))

    def in_use(self) -> int:
        """Estimate the memory that its jobs will free when they end.

        The estimate is only used to compare GPUs, and never gives a GPU to a job.
        """
        total = 0
        for job in self.jobs:
            taken = self.taken(job)
            if not taken:
                taken = min(job.reserved_bytes, self.gpu.used_bytes)
            total += taken
        return total

    def distance(self, job: QueuedJob) -> tuple[Any, ...]:
        """Return a sort key by which the GPU that will suit the job soonest comes first.

        Programs outside of the queue end at an unknown time, so they count most. Then follow jobs
        that overtook this job on the GPU, the missing memory, and the start of the GPU's first job.
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
        """Return when the newest job that overtook this job started on the GPU.

        Returns 0 if the GPU has room for this job next to the jobs that overtook it. A kept GPU
        gets no such job, so this figure keeps the set of kept GPUs stable.
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


# --- explanations for people -----------------------------------------------------------------


def who_goes_first(job: QueuedJob, order: Sequence[QueuedJob]) -> str:
    """Return why a later job goes first, or an empty string if no later job does."""
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

    Args:
        job: the waiting job.
        others: all other jobs.
        gpus: all GPUs of the host.
        decided: the current plan.
        holders: the users of processes on the GPUs by process id, as far as they are known.
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
    """Return the obstacle between a job and a GPU.

    Returns:
        A sort key, which is higher the longer the obstacle may last, and the obstacle. ``_NONE`` if
        the job could take the GPU.
    """
    if state.gpu.unusable is not None:
        return 4, state.gpu.unusable
    most = state.most(job)
    if state.count >= most:
        if state.is_exclusive():
            return 1, "taken, and its compute mode allows one process"
        jobs = "one job" if most == 1 else f"{most} jobs"
        of_job_there = " of the job there" if most < job.jobs_per_device else ""
        return 1, f"taken, {jobs} per GPU (gpu_jobs_per_device={most}{of_job_there})"
    if state.usable < job.reserved_bytes:
        if state.gpu.free_bytes + state.in_use() >= job.reserved_bytes:
            return 2, "ours"
        return 3, "others"
    if kept_for is not None:
        return 0, f"kept for job {kept_for}, which is ahead in the queue"
    return _NONE


def _sentence(
    text: str, states: Sequence[GpuState], job: QueuedJob, holders: Mapping[int, GpuUser]
) -> str:
    """Return the sentence about the GPUs that have the same obstacle."""
    numbers = ", ".join(dict.fromkeys(str(state.gpu.index) for state in states))
    if text in ("ours", "others"):
        usable = max(max(state.usable for state in states), 0)
        most = "at most " if len(states) > 1 else ""
        text = f"{most}{usable // MIB} of {mib(job.reserved_bytes)} free"
        jobs = dict.fromkeys(other.shown_id for state in states for other in state.jobs)
        processes = [process for state in states for process in state.gpu.processes or ()]
        if jobs:
            text += f" next to job {', '.join(jobs)}"
        elif processes:
            largest = max(processes, key=lambda process: process.used_bytes or 0)
            text += f", {describe_process(largest, holders)}"
    gpus = "GPUs" if len(states) > 1 else "GPU"
    return f"{gpus} {numbers}: {text}"


def describe(jobs: Iterable[QueuedJob], gpus: Sequence[GpuInfo]) -> list[str]:
    """Return a line for each GPU: its free memory, and the memory of each job on it."""
    lines = []
    for state in gpu_states(jobs, gpus).values():
        gpu = state.gpu
        free = f"{mib(gpu.free_bytes)} of {mib(gpu.total_bytes)} free"
        parts = [gpu.unusable or free]
        for job in state.jobs:
            who = f"{job.name}, {user_name(job.owner)}"
            part = f"{mib(job.reserved_bytes)} reserved by job {job.shown_id} ({who})"
            if job.draining:
                part += ", which is leaving"
            parts.append(part)
        others = gpu.used_bytes - state.in_use()
        if others >= MIB:
            parts.append(f"{mib(others)} used by others")
        lines.append(f"{label(gpu)}: {', '.join(parts)}")
    return lines
