"""10,000 jobs on 512 GPUs through the pure scheduler: cost, utilisation, longest wait.

A simulation in its own time: jobs come at random so that the machine is about full, need 4 to 40 GB
of GPUs with 40 GB, and run for minutes to hours; every arrival and every end is an event at which
the scheduler is asked. The same jobs under strict first come, first served (nobody passes) are the
comparison. Utilisation is claimed memory × time over the memory of the machine, up to the last
arrival; the packing bound is what the jobs could use at most, were memory one pool.

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

from robust_train.gpu import scheduler
from robust_train.gpu.scheduler import Holding, Waiter, plan
from robust_train.types import MIB, GpuInfo

TOTAL = 40000


@dataclass(frozen=True)
class Job:
    """One job: when it comes, what it needs (MiB), how long it runs (seconds)."""

    number: int
    arrives: float
    need: int
    seconds: float


def workload(jobs: int, gpus: int, load: float, per_device: int) -> list[Job]:
    rng = random.Random(7)
    sizes = (4000, 4000, 8000, 8000, 16000, 24000, 40000)
    drawn = [(rng.choice(sizes), min(rng.lognormvariate(7.5, 1.0), 36000.0)) for _ in range(jobs)]
    if per_device == 1:
        work = sum(seconds for _, seconds in drawn) / gpus
    else:
        work = sum(need * seconds for need, seconds in drawn) / (gpus * TOTAL)
    span = work / load
    times = sorted(rng.uniform(0, span) for _ in range(jobs))
    return [Job(n, at, *size) for n, (at, size) in enumerate(zip(times, drawn, strict=True))]


def simulate(jobs: Sequence[Job], gpus: int, per_device: int, *, passing: bool) -> dict[str, float]:
    """Run the workload; without ``passing`` nobody starts before those who came earlier."""
    machine = {
        f"GPU-{n:04}": GpuInfo(f"GPU-{n:04}", "A100", n, f"{n:08x}", TOTAL * MIB, TOTAL * MIB, 0)
        for n in range(gpus)
    }
    everywhere = frozenset(machine)
    events = [(job.arrives, 0, job.number) for job in jobs]
    heapq.heapify(events)
    waiting: dict[str, Waiter] = {}
    running: dict[str, Holding] = {}
    waits: list[float] = []
    costs: list[float] = []
    used_area = demand_area = 0.0
    used = demand = 0
    before, last_arrival = 0.0, jobs[-1].arrives
    while events:
        now, kind, number = heapq.heappop(events)
        if now <= last_arrival:
            used_area += used * (now - before)
            demand_area += min(used + demand, gpus * TOTAL) * (now - before)
            before = now
        job = jobs[number]
        name = str(number)
        if kind == 0:
            demand += job.need
            size = job.need * MIB
            waiting[name] = Waiter(name, number, size, everywhere, per_device, now)
        else:
            ended = running.pop(name)
            used -= job.need
            assert ended.gpu is not None
            here = machine[ended.gpu]
            machine[ended.gpu] = replace(here, free_bytes=here.free_bytes + ended.claim_bytes)
        started = time.perf_counter()
        decided = plan(waiting.values(), list(running.values()), list(machine.values()), now)
        costs.append(time.perf_counter() - started)
        for granted, gpu in decided.grants.items():
            if (
                not passing
                and decided.head is not None
                and waiting[granted].ticket > int(decided.head)
            ):
                continue
            waiter = waiting.pop(granted)
            one = jobs[int(granted)]
            used, demand = used + one.need, demand - one.need
            here = machine[gpu.uuid]
            free = here.free_bytes - waiter.need_bytes
            assert free >= 0, "over-committed"
            machine[gpu.uuid] = replace(here, free_bytes=free)
            size = waiter.need_bytes
            running[granted] = Holding(
                granted, gpu.uuid, size, size, per_device, now, ticket=waiter.ticket
            )
            waits.append(now - one.arrives)
            heapq.heappush(events, (now + one.seconds, 1, one.number))
    assert len(waits) == len(jobs), "somebody was never served"
    return {
        "cost_ms": statistics.mean(costs) * 1000,
        "worst_ms": max(costs) * 1000,
        "utilisation": used_area / (gpus * TOTAL * last_arrival),
        "bound": demand_area / (gpus * TOTAL * last_arrival),
        "mean_wait": statistics.mean(waits),
        "longest_wait": max(waits),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=10000)
    parser.add_argument("--gpus", type=int, default=512)
    parser.add_argument("--load", type=float, default=1.1)
    parser.add_argument(
        "--doubles-every",
        type=float,
        default=scheduler._DOUBLES_EVERY_SECONDS,
        help="seconds after which twice as many GPUs are held back for the head of the line",
    )
    arguments = parser.parse_args()
    scheduler._DOUBLES_EVERY_SECONDS = arguments.doubles_every
    for per_device in (1, 8):
        jobs = workload(arguments.jobs, arguments.gpus, arguments.load, per_device)
        ours = simulate(jobs, arguments.gpus, per_device, passing=True)
        fifo = simulate(jobs, arguments.gpus, per_device, passing=False)
        print(f"{len(jobs)} jobs on {arguments.gpus} GPUs, up to {per_device} a GPU:")
        print(
            f"  cost of an event: mean {ours['cost_ms']:.2f} ms, longest {ours['worst_ms']:.1f} ms"
        )
        print(
            f"  memory in use: {ours['utilisation']:.1%} of the machine, "
            f"bound {ours['bound']:.1%}, strict order {fifo['utilisation']:.1%}"
        )
        print(
            f"  mean wait ÷ strict order's: {_ratio(ours['mean_wait'], fifo['mean_wait'])}; "
            f"longest: {_ratio(ours['longest_wait'], fifo['longest_wait'])}"
        )


def _ratio(ours: float, fifo: float) -> str:
    return (
        f"{ours / fifo:.2f} ({ours / 60:.0f} min ÷ {fifo / 60:.0f} min)" if fifo else "none waits"
    )


if __name__ == "__main__":
    main()
