"""10,000 jobs on 512 GPUs through the pure scheduler: cost, utilisation, longest wait.

A simulation in its own time: jobs come at random so that the machine is about full, need 4 to 40 GB
of GPUs with 40 GB, and run for minutes to hours; every arrival and every end is an event at which
the scheduler is asked. The same jobs under strict first come, first served (nobody passes) are the
comparison. Utilisation is claimed memory × time over the memory of the machine, up to the last
arrival; the packing bound is what the jobs could use at most, were memory one pool. Three rounds:
one job a GPU, up to eight, and one a GPU where every fourth job needs 2, 4 or 8 GPUs at once.

Then a small user beside a big one on 8 GPUs, over 20 random days: waits with the fair order and
first come, first served. The big one starts a sweep of 64 jobs (half an hour to eight hours each)
in the morning; the small one a job of about an hour every two hours, and in a second round one of
four GPUs. ``--users`` runs this part alone.

Run: python benchmarks/scheduler.py [--jobs 10000] [--gpus 512] [--load 1.1] [--doubles-every 300]
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from robust_train.model.gpu import GpuInfo
from robust_train.queue import plan as plans
from robust_train.queue.plan import Plan
from robust_train.queue.registry import QueuedJob
from robust_train.readable import MIB

TOTAL = 40000


@dataclass(frozen=True)
class Job:
    """One job: when it comes, what it needs (MiB a GPU, GPUs), how long it runs (seconds)."""

    number: int
    arrives: float
    need: int
    seconds: float
    count: int = 1
    user: int = 0

    @property
    def memory(self) -> int:
        """MiB on all its GPUs."""
        return self.need * self.count


def workload(
    jobs: int, gpus: int, load: float, per_device: int, counts: Sequence[int]
) -> list[Job]:
    rng = random.Random(7)
    sizes = (4000, 4000, 8000, 8000, 16000, 24000, 40000)
    drawn = [(rng.choice(sizes), min(rng.lognormvariate(7.5, 1.0), 36000.0)) for _ in range(jobs)]
    many = [rng.choice(counts) if len(counts) > 1 else counts[0] for _ in range(jobs)]
    each = [*zip(drawn, many, strict=True)]
    if per_device == 1:
        work = sum(seconds * count for (_, seconds), count in each) / gpus
    else:
        work = sum(need * seconds * count for (need, seconds), count in each) / (gpus * TOTAL)
    span = work / load
    times = sorted(rng.uniform(0, span) for _ in range(jobs))
    return [
        Job(n, at, *size, count)
        for n, (at, (size, count)) in enumerate(zip(times, each, strict=True))
    ]


def queued(job: Job, gpus: tuple[str, ...], now: float, per_device: int) -> QueuedJob:
    """Return a job as one that waits."""
    return QueuedJob(
        id=str(job.number),
        ticket=job.number,
        owner=job.user,
        reserved_bytes=job.need * MIB,
        count=job.count,
        jobs_per_device=per_device,
        only=gpus,
        queued_at=now,
        polled_at=float("inf"),
    )


def started_on(job: QueuedJob, group: Sequence[GpuInfo], now: float) -> QueuedJob:
    """Return a job that has taken all it needs on its GPUs."""
    running = job.on([gpu.uuid for gpu in group])
    return replace(running, taken_bytes=(job.reserved_bytes,) * job.count, since=now)


def simulate(jobs: Sequence[Job], gpus: int, per_device: int, *, passing: bool) -> dict[str, float]:
    """Run the workload; without ``passing`` nobody starts before those who came earlier."""
    machine = {
        f"GPU-{n:04}": GpuInfo(f"GPU-{n:04}", "A100", n, f"{n:08x}", TOTAL * MIB, TOTAL * MIB, 0)
        for n in range(gpus)
    }
    everywhere = tuple(machine)
    events = [(job.arrives, 0, job.number) for job in jobs]
    heapq.heapify(events)
    waiting: dict[str, QueuedJob] = {}
    running: dict[str, QueuedJob] = {}
    waits: list[float] = []
    costs: list[float] = []
    used_area = demand_area = busy_area = 0.0
    used = demand = 0
    jobs_on = dict.fromkeys(machine, 0)
    before, last_arrival = 0.0, jobs[-1].arrives
    while events:
        now, kind, number = heapq.heappop(events)
        if now <= last_arrival:
            used_area += used * (now - before)
            busy_area += sum(map(bool, jobs_on.values())) * (now - before)
            demand_area += min(used + demand, gpus * TOTAL) * (now - before)
            before = now
        job = jobs[number]
        name = str(number)
        if kind == 0:
            demand += job.memory
            waiting[name] = queued(job, everywhere, now, per_device)
        else:
            used -= job.memory
            ended = running.pop(name)
            for uuid in ended.gpus:
                here = machine[uuid]
                machine[uuid] = replace(here, free_bytes=here.free_bytes + ended.reserved_bytes)
                jobs_on[uuid] -= 1
        started = time.process_time()
        decided = Plan([*waiting.values(), *running.values()], list(machine.values()), now)
        costs.append(time.process_time() - started)
        for granted, group in decided.groups.items():
            is_later = bool(decided.first) and int(granted) > int(decided.first)
            if is_later and not passing:
                continue
            waiter = waiting.pop(granted)
            one = jobs[int(granted)]
            used, demand = used + one.memory, demand - one.memory
            assert len(group) == waiter.count
            for gpu in group:
                here = machine[gpu.uuid]
                assert here.free_bytes >= waiter.reserved_bytes, "over-committed"
                machine[gpu.uuid] = replace(
                    here, free_bytes=here.free_bytes - waiter.reserved_bytes
                )
                jobs_on[gpu.uuid] += 1
            running[granted] = started_on(waiter, group, now)
            waits.append(now - one.arrives)
            heapq.heappush(events, (now + one.seconds, 1, one.number))
    assert len(waits) == len(jobs), "somebody was never served"
    return {
        "cost_ms": statistics.mean(costs) * 1000,
        "worst_ms": max(costs) * 1000,
        "busy": busy_area / (gpus * last_arrival),
        "utilisation": used_area / (gpus * TOTAL * last_arrival),
        "bound": demand_area / (gpus * TOTAL * last_arrival),
        "mean_wait": statistics.mean(waits),
        "longest_wait": max(waits),
    }


BIG, SMALL = 1, 2
HOUR = 3600.0


def a_day(seed: int, count: int) -> list[Job]:
    """Return a sweep of 64 jobs and, from nine on, a job of the small user every two hours."""
    rng = random.Random(seed)
    jobs = []
    for _ in range(64):
        seconds = min(max(rng.lognormvariate(8.9, 0.7), HOUR / 2), 8 * HOUR)
        jobs.append((rng.uniform(0, 60), seconds, BIG, 1))
    for start in range(8):
        at = HOUR + 2 * HOUR * start + rng.uniform(0, HOUR)
        jobs.append((at, rng.uniform(0.5, 1.5) * HOUR, SMALL, count))
    return [
        Job(n, at, 30000, seconds, gpus, user)
        for n, (at, seconds, user, gpus) in enumerate(sorted(jobs))
    ]


SLICE = 20 * 60.0
AGAIN = 60.0  # seconds that a job loses each time that it leaves its GPUs


def waits_of_users(
    jobs: Sequence[Job], gpus: int, order: str
) -> tuple[dict[int, list[float]], float]:
    """Run the jobs; return each user's waits, and when the last one ended.

    With the order `slices` jobs are asked each minute whether they leave their GPUs.
    """
    machine = [
        GpuInfo(f"GPU-{n}", "A100", n, f"{n:08x}", TOTAL * MIB, TOTAL * MIB, 0) for n in range(gpus)
    ]
    everywhere = tuple(gpu.uuid for gpu in machine)
    events = [(job.arrives, 0, job.number) for job in jobs]
    heapq.heapify(events)
    waiting: dict[str, QueuedJob] = {}
    running: dict[str, QueuedJob] = {}
    waits: dict[int, list[float]] = {BIG: [], SMALL: []}
    left = {job.number: job.seconds for job in jobs}
    ends: dict[str, float] = {}
    began: set[str] = set()
    now, tickets = 0.0, len(jobs)
    while events:
        now, kind, number = heapq.heappop(events)
        name = str(number)
        if kind == 0:
            job = queued(jobs[number], everywhere, now, 1)
            # within one user it is first come, first served
            waiting[job.id] = replace(job, owner=0) if order == "fifo" else job
        elif kind == 1 and ends.get(name) == now:
            del running[name]
        busy = {uuid for job in running.values() for uuid in job.gpus}
        free = [
            replace(gpu, free_bytes=gpu.free_bytes - (gpu.uuid in busy) * 30000 * MIB)
            for gpu in machine
        ]
        decided = Plan([*waiting.values(), *running.values()], free, now)
        for granted, group in decided.groups.items():
            one = jobs[int(granted)]
            running[granted] = started_on(waiting.pop(granted), group, now)
            if granted not in began:
                began.add(granted)
                waits[one.user].append(now - one.arrives)
            ends[granted] = now + left[one.number]
            heapq.heappush(events, (ends[granted], 1, one.number))
        if order != "slices" or not waiting:
            continue
        for name, job in list(running.items()):
            others = [*waiting.values(), *(one for one in running.values() if one is not job)]
            is_over = now - job.since >= SLICE
            if is_over and plans.waits_for(job, others, free, now) is not None:
                left[int(name)] = ends.pop(name) - now + AGAIN
                del running[name]
                tickets += 1
                again = queued(jobs[int(name)], everywhere, now, 1)
                waiting[name] = replace(again, ticket=tickets)
                break
        if not events or events[0][0] > now + 60:
            heapq.heappush(events, (now + 60, 2, 0))
    return waits, now


def compare_users(days: int) -> None:
    print("| small user's jobs | order | small user waits | big user waits | all done after |")
    print("|---|---|---|---|---|")
    for count in (1, 4):
        for order in ("slices", "fair", "fifo"):
            seen = [waits_of_users(a_day(seed, count), 8, order) for seed in range(days)]
            cells = []
            for user in (SMALL, BIG):
                waits = [wait / 60 for found, _ in seen for wait in found[user]]
                middle, longest = statistics.median(waits), max(waits)
                cells.append(f"{middle:.0f} min, longest {longest:.0f} min")
            end = statistics.mean(end for _, end in seen) / HOUR
            gpus = f"{count} GPU{'s' * (count > 1)}"
            print(f"| of {gpus} | {order} | {' | '.join(cells)} | {end:.1f} h |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=10000)
    parser.add_argument("--gpus", type=int, default=512)
    parser.add_argument("--load", type=float, default=1.1)
    parser.add_argument(
        "--doubles-every",
        type=float,
        default=plans._DOUBLES_EVERY_SECONDS,
        help="seconds after which twice as many GPUs are kept for the first waiting job",
    )
    parser.add_argument("--users", action="store_true", help="the two users alone")
    parser.add_argument("--days", type=int, default=20, help="of the two users")
    arguments = parser.parse_args()
    if arguments.users:
        compare_users(arguments.days)
        return
    plans._DOUBLES_EVERY_SECONDS = arguments.doubles_every
    for per_device, counts in ((1, (1,)), (8, (1,)), (1, (1,) * 9 + (2, 4, 8))):
        jobs = workload(arguments.jobs, arguments.gpus, arguments.load, per_device, counts)
        ours = simulate(jobs, arguments.gpus, per_device, passing=True)
        fifo = simulate(jobs, arguments.gpus, per_device, passing=False)
        most = f", of up to {max(counts)} GPUs" if max(counts) > 1 else ""
        print(f"{len(jobs)} jobs{most} on {arguments.gpus} GPUs, up to {per_device} a GPU:")
        print(
            f"  cost of an event: mean {ours['cost_ms']:.2f} ms, longest {ours['worst_ms']:.1f} ms"
        )
        print(
            f"  memory in use: {ours['utilisation']:.1%} of the machine, "
            f"bound {ours['bound']:.1%}, strict order {fifo['utilisation']:.1%}; "
            f"GPUs in use: {ours['busy']:.1%}"
        )
        print(
            f"  mean wait ÷ strict order's: {_ratio(ours['mean_wait'], fifo['mean_wait'])}; "
            f"longest: {_ratio(ours['longest_wait'], fifo['longest_wait'])}"
        )
    compare_users(arguments.days)


def _ratio(ours: float, fifo: float) -> str:
    return (
        f"{ours / fifo:.2f} ({ours / 60:.0f} min ÷ {fifo / 60:.0f} min)" if fifo else "none waits"
    )


if __name__ == "__main__":
    main()
