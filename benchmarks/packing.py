"""64 small jobs of four micro-batches on 8 simulated GPUs of 40 GB: packed by memory, and alone.

Every job is a process that queues with the launcher's code, takes memory as a trace says (its CUDA
context, half of its tensors, the rest at the first validation) from a device that refuses to be
over-committed, and lets its reservation follow. A controller adds jobs as a sweep with
``gpu_jobs_per_device=auto`` does. Beside it, in the same run: today's default, 4000 MiB reserved
and one job on a GPU. The launchers' own start is left out, and jobs do not slow each other.
Needs a C compiler, no GPU.

Run: python benchmarks/packing.py [--jobs 64] [--gpus 8] [--job-seconds 10] [--killed 0]
Goals: at most 0.5 of the time; no job lost to memory; nothing over-committed, also with
``--killed 0.2``; what is reserved after the measurement is 1.0 to 1.15 of the true peak.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

MIB = 1024**2
TOTAL_MIB = 40_000
CONTEXT_MIB = 500
MICRO_BATCHES = (64, 40, 24, 8)  # of a sweep's jobs, the largest first
STEPS = 40
# steps that a job has done; its reservation in 1/1000 of its true peak, the least and the largest
_ROW = struct.Struct("<qqq")


@dataclass(frozen=True)
class Setting:
    """How the jobs run."""

    is_packed: bool
    jobs: int
    job_seconds: float
    killed_share: float


def run_job(number: int, setting: Setting, folder: Path, board: mmap.mmap) -> None:
    """Queue for a GPU, and hold memory there as a trace says. Raises OutOfMemory."""
    from robust_train.features.measured_memory.model import (
        MOST_TOGETHER,
        add_margin,
        estimate_peak,
        is_measured,
    )
    from robust_train.features.measured_memory.store import Need, read_needs, remember
    from robust_train.gpu.inventory import read_inventory
    from robust_train.gpu.visible import visible_gpus
    from robust_train.queue.host_queue import GpuRequest, HostQueue
    from robust_train.queue.queue_dir import directory_for
    from robust_train.queue.registry import QueuedJob
    from robust_train.queue.waiting import NoGpu, wait_for_gpus
    from simulated_nvml.device import SharedDevice

    size = MICRO_BATCHES[number * len(MICRO_BATCHES) // setting.jobs]
    peak_mib = 1500 + 150 * size
    store = folder / "needs.json"
    need = 4000 * MIB
    most = 1
    if setting.is_packed:
        peak = estimate_peak(read_needs(store).get("sweep", Need()).on(), size)
        if peak:
            need = add_margin(peak)
            most = MOST_TOGETHER

    def read(processes: bool) -> Any:
        return visible_gpus(read_inventory(processes=processes), os.environ)

    job = QueuedJob(name=str(number), run_dir=f"/{number}", jobs_per_device=most)
    queue = HostQueue(directory_for(None, os.environ), read, job)
    group = wait_for_gpus(queue, GpuRequest(need, timeout_seconds=900, interval_seconds=5.0))
    assert not isinstance(group, NoGpu), group
    uuid = group[0].uuid
    device = SharedDevice(Path(os.environ["SIMULATED_NVML_STATE"]), owner=number)
    tensors = peak_mib - CONTEXT_MIB
    takes = {0: CONTEXT_MIB, 1: tensors // 2, STEPS // 4: tensors - tensors // 2}
    held = 0
    was_settled = False
    shares = (0, 0)
    for step in range(STEPS):
        if step in takes:
            device.allocate(uuid, takes[step])
            held += takes[step] * MIB
        time.sleep(setting.job_seconds / STEPS)
        has_validated = step > STEPS // 4
        is_settled = is_measured(step, saved=has_validated, quiet_seconds=0)
        if not setting.is_packed:
            continue
        wanted = add_margin(held)
        if not is_settled:
            wanted = max(wanted, need)
        reserved = queue.follow([held], wanted, MOST_TOGETHER if is_settled else None) or 0
        if is_settled:
            share = 1000 * reserved // (peak_mib * MIB)
            shares = (min(shares[0], share) if shares[0] else share, max(shares[1], share))
        _ROW.pack_into(board, number * _ROW.size, step + 1, *shares)
        if is_settled and not was_settled:
            remember("sweep", "A100", size, held, store)
        was_settled = is_settled
    device.release()
    queue.release()


def run_all(setting: Setting, folder: Path) -> dict[str, Any]:
    """Run all jobs as a sweep does; return the figures."""
    import pynvml  # noqa: F401  # once, before the forks

    from robust_train.queue.queue_dir import directory_for
    from robust_train.queue.registry import Registry
    from robust_train.sweep.packing import GpuMemory, Look, Packing, room_for
    from simulated_nvml.device import SharedDevice

    device = SharedDevice(Path(os.environ["SIMULATED_NVML_STATE"]))
    gpus = {uuid: GpuMemory(size * MIB) for uuid, size in device.totals().items()}
    registry = Registry(directory_for(None, os.environ))
    board = mmap.mmap(-1, setting.jobs * _ROW.size)
    waiting = list(range(setting.jobs))
    packing = Packing(len(gpus), len(gpus))
    running: dict[int, int] = {}  # numbers by process id
    victims = random.Random(1).sample(waiting, int(setting.killed_share * setting.jobs))
    kill_at: dict[int, float] = {}
    lost = over = most = 0
    stage_began = time.monotonic()
    stage_steps = 0
    started = time.monotonic()
    while waiting or running:
        while waiting and len(running) < packing.limit:
            number = waiting.pop(0)
            pid = os.fork()
            if pid == 0:
                end_as(run_job, number, setting, folder, board)
            running[pid] = number
            if number in victims:
                victims.remove(number)
                kill_at[pid] = time.monotonic() + random.uniform(0.5, setting.job_seconds)
        time.sleep(0.1)
        now = time.monotonic()
        for pid in [pid for pid, when in kill_at.items() if when < now and pid in running]:
            os.kill(pid, signal.SIGKILL)
            del kill_at[pid]
        for pid, code in ended(running):
            number = running.pop(pid)
            kill_at.pop(pid, None)
            if code == -signal.SIGKILL:
                waiting.append(number)
            elif code:
                lost += 1
        device.collect()
        jobs = registry.jobs()
        over += is_over_committed(jobs, gpus)
        mine = [job for job in jobs if job.gpus]
        most = max(most, len(mine))
        measured = [job for job in mine if job.jobs_per_device > 1]
        steps = sum(row[0] for row in _ROW.iter_unpack(board))
        seconds = now - stage_began
        is_long = seconds >= setting.job_seconds / 10
        rate = (steps - stage_steps) / seconds if is_long and steps > stage_steps else None
        look = Look(
            on_gpus=len(mine),
            waiting=len(running) - len(mine),
            measured=len(measured),
            room=room_for(max((job.reserved_bytes for job in measured), default=0), gpus, jobs),
            rate=rate,
        )
        before = packing
        packing = packing.after(look) if setting.is_packed else packing
        if packing.limit != before.limit or is_long:
            stage_began = now
            stage_steps = steps
    rows = [row for row in _ROW.iter_unpack(board) if row[1]]
    return {
        "seconds": time.monotonic() - started,
        "lost": lost,
        "over": over,
        "together": most,
        "least": min((row[1] for row in rows), default=0) / 1000,
        "largest": max((row[2] for row in rows), default=0) / 1000,
    }


def end_as(function: Any, *arguments: Any) -> None:
    """Call a function and end this process: 0, or 1 if it raises."""
    code = 1
    try:
        function(*arguments)
        code = 0
    except BaseException as error:
        print(f"job {arguments[0]}: {error!r}", file=sys.stderr, flush=True)
    os._exit(code)


def ended(running: dict[int, int]) -> list[tuple[int, int]]:
    """Return the processes that have ended, with their exit codes."""
    codes = []
    for pid in running:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            codes.append((pid, os.waitstatus_to_exitcode(status)))
    return codes


def is_over_committed(jobs: Sequence[Any], gpus: dict[str, Any]) -> bool:
    """Return whether records promise more of a GPU than it has."""
    promised = dict.fromkeys(gpus, 0)
    for job in jobs:
        for uuid in job.gpus:
            promised[uuid] += job.reserved_bytes
    return any(promised[uuid] > gpus[uuid].total_bytes for uuid in gpus)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=64)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--job-seconds", type=float, default=10.0)
    parser.add_argument("--killed", type=float, default=0.0, help="share of the jobs")
    parser.add_argument("--on-machine", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    is_packed = arguments.on_machine == "packed"
    setting = Setting(is_packed, arguments.jobs, arguments.job_seconds, arguments.killed)
    if arguments.on_machine:
        print(json.dumps(run_all(setting, Path.cwd())))
        return

    from simulated_nvml import Gpu, Machine, build_nvml

    figures = {}
    for name in ("alone", "packed"):
        with tempfile.TemporaryDirectory() as folder:
            gpus = [Gpu(total_mib=TOTAL_MIB) for _ in range(arguments.gpus)]
            libraries = build_nvml(Path(folder) / "libraries").parent
            environ = Machine(Path(folder), libraries, gpus).environment()
            del environ["SIMULATED_NVML_CALLS"]  # Writing a log would be most of the time.
            command = [sys.executable, __file__, *sys.argv[1:], "--on-machine", name]
            done = subprocess.run(
                command, env=environ, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
            )
            figures[name] = json.loads(done.stdout)
        print(
            "{name}: {seconds:.1f} s, at most {together} jobs at once, {lost} lost to memory, "
            "{over} over-commits".format(name=name, **figures[name])
        )
    packed = figures["packed"]
    print(f"packed ÷ alone: {packed['seconds'] / figures['alone']['seconds']:.2f}")
    print(f"reserved ÷ true peak: {packed['least']:.2f} to {packed['largest']:.2f}")


if __name__ == "__main__":
    main()
