"""The host's queue on a simulated machine: hand-over, one look, and what a reservation costs.

- hand-over: from the moment a job releases its GPU (its descriptor is closed) to the moment the
  first waiting job has it, the interval between two polls being 600 s.
- a poll: CPU time of one poll of 8 GPUs by the first of 20 waiting jobs.
- reservation: taking and releasing a GPU on an empty machine, with the queue less without.

Needs a C compiler, no GPU.

Run: python benchmarks/gpu_queue.py [--rounds 200]
Goals: hand-over ≤ 300 ms, a poll < 2 ms of CPU, a reservation ≤ 5 ms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

MIB = 1024**2


def measure(rounds: int) -> None:
    """All three, on the machine that the environment describes."""

    from robust_train.gpu.inventory import read_inventory
    from robust_train.gpu.visible import visible_gpus
    from robust_train.queue.host_queue import GpuRequest, HostQueue
    from robust_train.queue.queue_dir import directory_for
    from robust_train.queue.registry import QueuedJob, Registry
    from robust_train.queue.waiting import NoGpu, Waiting, wait_for_gpus

    base = directory_for(None, os.environ)

    def look(processes: bool) -> object:
        return visible_gpus(read_inventory(processes=processes), os.environ)

    def job(directory: Path | None = base) -> HostQueue:
        return HostQueue(directory, look, QueuedJob(name="b"))

    request = GpuRequest(4000 * MIB, timeout_seconds=900, interval_seconds=600)

    def get(queue: HostQueue) -> None:
        found = wait_for_gpus(queue, request)
        assert not isinstance(found, NoGpu), found

    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(rounds):
        for name, directory in (("with", base), ("without", None)):
            started = time.perf_counter()
            queue = job(directory)
            get(queue)
            queue.release()
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) * 1000 for name, values in seconds.items()}
    extra = medians["with"] - medians["without"]
    both = f"{medians['with']:.2f} with, {medians['without']:.2f} without"
    print(f"reservation: {extra:.2f} ms ({both})")

    others = [job() for _ in range(8)]
    for queue in others:
        get(queue)
    waiting_jobs = []
    for _ in range(20):
        queue = job()
        queue.join(request)
        waiting_jobs.append((queue, Waiting(request, queue)))
        for _ in range(2):
            waiting_jobs[-1][1].poll()
    cpu = []
    for _ in range(rounds):
        started = time.process_time()
        found = waiting_jobs[0][1].poll()
        cpu.append(time.process_time() - started)
        assert not found
    print(f"a poll by the first of 20 waiting jobs: {statistics.median(cpu) * 1000:.2f} ms of CPU")
    bare = []
    for _ in range(rounds):
        started = time.process_time()
        look(False)
        bare.append(time.process_time() - started)
    print(f"of that the GPUs themselves: {statistics.median(bare) * 1000:.2f} ms")
    for queue, _ in waiting_jobs:
        queue.release()

    def wait(queue: HostQueue, when: list[float]) -> None:
        get(queue)
        when.append(time.perf_counter())

    gaps = []
    for _ in range(min(rounds, 50)):
        when: list[float] = []
        waiting = job()
        thread = threading.Thread(target=wait, args=(waiting, when))
        thread.start()
        registry = Registry(base)
        while not any(one.state == "waiting" for one in registry.jobs()):
            time.sleep(0.005)
        time.sleep(0.05)
        registry.close()
        released = time.perf_counter()
        others.pop(0).release()
        thread.join(30)
        gaps.append((when[0] - released) * 1000)
        others.append(waiting)
    gaps.sort()
    worst = gaps[-1]
    print(
        f"hand-over: median {statistics.median(gaps):.1f} ms, longest of {len(gaps)} {worst:.1f} ms"
    )
    for queue in others:
        queue.release()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--on-machine", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.on_machine:
        measure(arguments.rounds)
        return

    from simulated_nvml import Gpu, Machine, build_nvml

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        machine = Machine(folder, build_nvml(folder / "libraries").parent, [Gpu()] * 8)
        environ = machine.environment()
        del environ["SIMULATED_NVML_CALLS"]  # writing a log would be most of the time
        command = [sys.executable, __file__, "--on-machine", "--rounds", str(arguments.rounds)]
        subprocess.run(command, env=environ, check=True)


if __name__ == "__main__":
    main()
