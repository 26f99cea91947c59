"""Judges what happened on a host from what was seen from outside, sharing no code with the queue.

The log is one JSON object a line, times on CLOCK_MONOTONIC, which all processes share:

- ``enters`` (a job's file appeared) and ``leaves`` (its last descriptor was closed): by inotify, in
  the order in which the kernel tells. ``owns``, whose file it is: by the kernel's table of locks.
- ``takes``, ``returns``, ``refuses``: by the device itself, under its own lock; ``dies`` is what
  returns the memory of a dead process, some time after its death.
- ``arrives``, ``served``, ``killed``, ``error``: by the test's own code in and around the members.
  ``served`` carries when the member's last look at the GPUs began and ended, which goes through a
  function of the test's. Looks are made one at a time, so their order is that of the grants.
- ``over``: what was left at the end.

A job *passes* another that was in line before it and is still in line. That is lawful where it does
not delay the turn of the one passed, which means two things.

1. Nobody's place is taken: all who were before it in line and could surely have started at that
   moment still can, with the passing job where it is.
2. The first in line who could not start has as many GPUs as it needs where, from then on, it waits
   only for jobs that came there before it was the first in line: what has passed it there since
   leaves room for it.

Who "surely could have started" is counted with what the queue may not know: what others claim is
not free, and what they have taken beside that is not free either, since they may not have told it.
Nor is it known which GPUs are kept for those who were before and perhaps could not start; only that
those which the passing job has taken were not.

A job of several GPUs is given all of them in the moment in which it is served, or it is *torn*.

Who came to a GPU while memory of dead processes was still there is not held against the second: at
that moment nobody could count on that GPU.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

_FOREVER = float("inf")


@dataclass
class Job:
    """One launcher with its trainer, as it was seen.

    Attributes:
        member: its number.
        need: MiB that it claims on each of its GPUs.
        count: GPUs that it needs at once.
        place: its place in the order of entering the line; None if it was not seen to.
        enters: when it was seen in line.
        asked: when the look began after which it was given its GPUs; never if it was given none.
        decided: when that look had ended.
        gpus: which; none where it was not served.
        used: on which its trainer took memory.
        leaves: when its reservation was seen to be gone.
        takes: when its trainer first took memory.
        returned: when the last of its memory was back.
        killed: when somebody killed a process of it.
        trainer_killed: when that was its trainer.
    """

    member: int
    need: int
    count: int = 1
    place: int | None = None
    enters: float = _FOREVER
    asked: float = _FOREVER
    decided: float = _FOREVER
    gpus: tuple[str, ...] = ()
    used: set[str] = field(default_factory=set)
    leaves: float = _FOREVER
    takes: float = _FOREVER
    returned: float = 0.0
    killed: float = _FOREVER
    trainer_killed: float = _FOREVER

    @property
    def gone(self) -> float:
        """Since when neither its reservation nor its memory was in anybody's way."""
        return max(self.leaves, self.returned)

    def waits_at(self, when: float) -> bool:
        """Whether it surely stood in line at a moment."""
        return self.enters < when < min(self.decided, self.killed)

    def may_hold(self, since: float, until: float) -> bool:
        """Whether it may have been on its GPUs between two moments: an end is seen a bit late."""
        return self.decided <= until and since < self.gone

    def holds_at(self, when: float) -> bool:
        """Whether it surely was on its GPUs at a moment: its trainer had memory, and lived."""
        until = min(self.returned if self.takes < _FOREVER else self.leaves, self.killed)
        return self.decided <= when < until


@dataclass(frozen=True)
class Verdict:
    """What was found; faults are all but the last five.

    Attributes:
        over_commits: allocations that a device refused, and moments with claims beyond its memory.
        crowded: jobs that came to a GPU which had all the jobs it may have.
        torn: jobs that were given fewer GPUs than they need, or some twice, or used others.
        leaked_bytes: MiB on devices at the end.
        leaked_locks: reservations that somebody still held at the end.
        unserved: jobs that nobody killed and that never got their GPUs.
        places_taken: passes against the first rule.
        heads_delayed: passes against the second rule.
        errors: members that failed or were refused.
        served: jobs that got their GPUs.
        killed: jobs of which a process was killed.
        passes: pairs of a job and one that it passed.
        judged: grants that passed somebody.
        seen: jobs whose place in line was seen.
    """

    over_commits: int = 0
    crowded: int = 0
    torn: int = 0
    leaked_bytes: int = 0
    leaked_locks: int = 0
    unserved: int = 0
    places_taken: int = 0
    heads_delayed: int = 0
    errors: int = 0
    served: int = 0
    killed: int = 0
    passes: int = 0
    judged: int = 0
    seen: int = 0

    @property
    def faults(self) -> int:
        """All that must not be."""
        facts = ("served", "killed", "passes", "judged", "seen")
        return sum(getattr(self, item.name) for item in fields(self) if item.name not in facts)


@dataclass
class _Host:
    """The log, sorted out."""

    jobs: dict[int, Job] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    per_device: int = 1
    drains: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def surely_there(self, when: float) -> dict[str, list[Job]]:
        """Who was on which GPU."""
        return self._by_gpu(job for job in self.jobs.values() if job.holds_at(when))

    def maybe_there(self, looking: Job) -> dict[str, list[Job]]:
        """Who else may have been on which GPU when a job looked and was given one."""
        jobs = (job for job in self.jobs.values() if job is not looking)
        since, until = looking.asked, looking.decided
        return self._by_gpu(job for job in jobs if job.may_hold(since, until))

    def _by_gpu(self, jobs: Iterable[Job]) -> dict[str, list[Job]]:
        found: dict[str, list[Job]] = {gpu: [] for gpu in self.totals}
        for job in jobs:
            for gpu in job.gpus:
                found[gpu].append(job)
        return found

    def has_room(self, gpu: str, there: Sequence[Job], job: Job) -> bool:
        """Whether a job fits beside others."""
        claimed = sum(other.need for other in there)
        return len(there) < self.per_device and claimed + job.need <= self.totals[gpu]

    def has_room_for_sure(self, gpu: str, there: Sequence[Job], job: Job) -> bool:
        """Whether it does even where others took all that they claim, and told nothing of it."""
        claimed_and_taken = 2 * sum(other.need for other in there)
        return len(there) < self.per_device and claimed_and_taken + job.need <= self.totals[gpu]

    def is_draining(self, gpu: str, when: float) -> bool:
        """Whether memory of the dead was on a GPU."""
        return any(since <= when <= until for since, until in self.drains.get(gpu, ()))


def judge(lines: Iterable[str]) -> Verdict:
    """Judge a log."""
    events = sorted((json.loads(line) for line in lines), key=lambda event: event["t"])
    host = _sort_out(events)
    over = next(event for event in events if event["event"] == "over")
    count = {name: sum(e["event"] == name for e in events) for name in ("refuses", "error")}
    jobs = list(host.jobs.values())
    taken = delayed = passes = judged = crowded = overclaims = torn = 0
    for job in jobs:
        if not job.gpus:
            continue
        torn += (
            not job.used <= set(job.gpus) or not len(job.gpus) == len(set(job.gpus)) == job.count
        )
        # a reservation that is seen to go later than it did is not held against the next
        others = [o for o in jobs if o is not job and _surely_there(o, job)]
        there = {gpu: [o for o in others if gpu in o.gpus] for gpu in job.gpus}
        crowded += any(len(beside) >= host.per_device for beside in there.values())
        overclaims += any(
            sum(o.need for o in beside) + job.need > host.totals[gpu]
            for gpu, beside in there.items()
        )
        if job.place is None:
            continue
        passed = sorted(
            (o for o in jobs if _is_before(o, job) and o.waits_at(job.decided)),
            key=lambda other: other.place or 0,
        )
        passes += len(passed)
        judged += bool(passed)
        if passed:
            # no doubt is held against the queue: for one what may be there, then what surely is
            able = _able_to_start(host, passed, host.maybe_there(job), job)
            taken += not _can_all_start(host, able, _with(job, host.surely_there(job.decided)))
            head = next((other for other in passed if other not in able), None)
            delayed += head is not None and not _keeps_its_gpus(host, head, job)
    return Verdict(
        over_commits=count["refuses"] + overclaims,
        crowded=crowded,
        torn=torn,
        leaked_bytes=sum(over["left_on_device"].values()),
        leaked_locks=over["left_locked"],
        unserved=sum(not job.gpus and job.killed == _FOREVER for job in jobs),
        places_taken=taken,
        heads_delayed=delayed,
        errors=count["error"],
        served=sum(bool(job.gpus) for job in jobs),
        killed=sum(job.killed < _FOREVER for job in jobs),
        passes=passes,
        judged=judged,
        seen=sum(job.place is not None for job in jobs),
    )


def _sort_out(events: Sequence[Mapping[str, Any]]) -> _Host:
    host = _Host()
    files: dict[str, int] = {}
    entered: dict[str, tuple[int, float]] = {}
    left: dict[str, float] = {}
    drains: list[tuple[int, str, float]] = []
    for event in events:
        kind, when = event["event"], event["t"]
        job = host.jobs.get(event["member"])
        if kind == "arrives":
            host.jobs[event["member"]] = Job(event["member"], event["need"], event["count"])
            host.per_device = event["per_device"]
        elif kind == "enters":
            entered[event["file"]] = (len(entered), when)
        elif kind == "owns":
            files[event["file"]] = event["member"]
        elif kind == "leaves":
            left[event["file"]] = when
        elif kind == "over":
            host.totals = dict(event["totals"])
        elif kind == "dies":
            drains.append((event["member"], event["gpu"], when))
        if job is None:
            continue
        if kind == "served":
            job.gpus, job.asked, job.decided = tuple(event["gpus"]), event["asked"], event["looked"]
            files[event["file"]] = job.member
        elif kind == "takes":
            job.takes = min(job.takes, when)
            job.used.add(event["gpu"])
        elif kind in ("returns", "dies"):
            job.returned = when
        elif kind == "killed":
            job.killed = min(job.killed, when)
            if event["what"] == "trainer":
                job.trainer_killed = min(job.trainer_killed, when)
    for name, member in files.items():
        if name in entered and member in host.jobs:
            host.jobs[member].place, host.jobs[member].enters = entered[name]
            host.jobs[member].leaves = left.get(name, _FOREVER)
    for member, gpu, until in drains:
        host.drains.setdefault(gpu, []).append((host.jobs[member].trainer_killed, until))
    return host


def _is_before(other: Job, job: Job) -> bool:
    return other.place is not None and job.place is not None and other.place < job.place


def _surely_there(other: Job, job: Job) -> bool:
    """Whether another had memory on its GPUs before this job took any, and lived and had it."""
    return other.takes < job.takes < min(other.returned, other.trainer_killed)


def _with(job: Job, there: dict[str, list[Job]]) -> dict[str, list[Job]]:
    """The same, with a job on its GPUs."""
    return there | {gpu: [*(o for o in there[gpu] if o is not job), job] for gpu in job.gpus}


def _able_to_start(
    host: _Host, line: Sequence[Job], there: Mapping[str, Sequence[Job]], passing: Job
) -> list[Job]:
    """Of a line, those that could surely start, who comes first going before.

    Where those before it go is for the queue to choose; so there have to be as many more GPUs with
    room for it as those before it that start might take, each of them others. Those before it of
    which it is not sure might have as many kept for them, but not what the passing job has taken.
    """
    able: list[Job] = []
    kept = 0
    for job in line:
        rooms = {gpu for gpu, others in there.items() if host.has_room_for_sure(gpu, others, job)}
        open_to_it = len(rooms.intersection(passing.gpus)) + max(
            len(rooms.difference(passing.gpus)) - kept, 0
        )
        if open_to_it >= job.count + sum(other.count for other in able):
            able.append(job)
        else:
            kept += job.count
    return able


def _can_all_start(host: _Host, jobs: Sequence[Job], there: Mapping[str, Sequence[Job]]) -> bool:
    """Whether there is room for all of them at once, wherever each of them goes."""
    if not jobs:
        return True
    job, rest = jobs[0], jobs[1:]
    rooms = [gpu for gpu, others in there.items() if host.has_room(gpu, others, job)]
    tried = set()
    for group in itertools.combinations(rooms, job.count):
        like = tuple(
            sorted((host.totals[g], len(there[g]), sum(o.need for o in there[g])) for g in group)
        )
        if like in tried:
            continue  # other GPUs in the same state would give the same answer
        tried.add(like)
        if _can_all_start(host, rest, {**there, **{gpu: [*there[gpu], job] for gpu in group}}):
            return True
    return False


def _keeps_its_gpus(host: _Host, head: Job, passing: Job) -> bool:
    """Whether the first in line has enough GPUs where it waits only for who was there before."""
    when = passing.decided
    before = [job for job in host.jobs.values() if _is_before(job, head)]
    first_since = max([head.enters, *(min(j.decided, j.killed) for j in before)])
    kept = 0
    for gpu, there in _with(passing, host.surely_there(when)).items():
        passers = [
            job
            for job in there
            if _is_before(head, job)
            and job.decided > first_since
            and not host.is_draining(gpu, job.decided)
        ]
        kept += host.has_room(gpu, passers, head)
    return kept >= head.count
