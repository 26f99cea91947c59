"""A sweep of four jobs on two simulated GPUs: how well the GPUs are filled.

Four jobs of different lengths, each needing most of a GPU, as one sweep under
``hydra/launcher=gpu_queue`` against perfect packing (the same lengths without any launcher's time),
and as four plain programs that look for free memory every 30 seconds. The GPUs' free memory follows
what the jobs hold, and the log of who held what when is checked for two jobs on one GPU.
Needs a C compiler, no GPU.

Run: python benchmarks/sweep.py [--job-seconds 30] [--poll-seconds 30]
Goal: the sweep takes at most 1.12 × perfect packing: each job imports torch itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from simulated_nvml import Gpu, Machine, build_nvml  # noqa: E402

GPUS = 2
NEED_MB = 30_000
# in this order first come, first served is perfect packing too
LENGTHS = (1.0, 1.2, 1.0, 0.8)

PLAIN_POLL = """
import sys, time
from robust_train.gpu.inventory import read_inventory
import sweep_trainer
seconds, every, need = map(float, sys.argv[1:])
while True:
    gpus = read_inventory(processes=False).gpus
    best = max(gpus, key=lambda gpu: gpu.free_bytes)
    if best.free_bytes >= need * 1024**2:
        break
    time.sleep(every)
sweep_trainer.hold(best.uuid, seconds)
"""


def perfect_packing(lengths: list[float]) -> float:
    """Seconds until the last job ends in the best assignment of jobs to GPUs."""
    return min(
        max(sum(s for s, g in zip(lengths, where, strict=True) if g == gpu) for gpu in range(GPUS))
        for where in itertools.product(range(GPUS), repeat=len(lengths))
    )


def environment(machine: Machine, folder: Path) -> dict[str, str]:
    """What programs on the machine need; a queue of their own, not that of this host."""
    paths = os.pathsep.join([str(HERE), str(ROOT / "src"), str(ROOT / "tests" / "support")])
    return machine.environment(
        PYTHONPATH=paths,
        ROBUST_TRAIN_STATE_DIR=str(folder / "runs"),
        SWEEP_BENCHMARK_LOG=str(folder / "held.jsonl"),
    )


def sweep(machine: Machine, folder: Path, lengths: list[float], *options: str) -> float:
    """Wall seconds of the sweep, from the command to its end."""
    started = time.perf_counter()
    subprocess.run(
        [
            sys.executable,
            str(ROOT / "train_robust.py"),
            "-m",
            "hydra/launcher=gpu_queue",
            "trainer._target_=sweep_trainer.train",
            "+seconds=" + ",".join(f"{length:g}" for length in lengths),
            f"min_gpu_memory_mb={NEED_MB}",
            "allow_cpu_fallback=false",
            f"hydra.sweep.dir={folder}/sweep",
            *options,
        ],
        env=environment(machine, folder),
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return time.perf_counter() - started


def one_job(machine: Machine, folder: Path) -> float:
    """Wall seconds of a job that takes no time: what every command costs, a sweep or not."""
    started = time.perf_counter()
    subprocess.run(
        [
            sys.executable,
            str(ROOT / "train_robust.py"),
            "trainer._target_=sweep_trainer.train",
            "+seconds=0",
            f"min_gpu_memory_mb={NEED_MB}",
            f"hydra.run.dir={folder}/run",
        ],
        env=environment(machine, folder),
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return time.perf_counter() - started


def plain_poll(machine: Machine, folder: Path, lengths: list[float], every: float) -> float:
    """Wall seconds of four programs that look for themselves, started a second apart."""
    started = time.perf_counter()
    programs = []
    for length in lengths:
        command = [sys.executable, "-c", PLAIN_POLL, f"{length}", f"{every}", f"{NEED_MB}"]
        programs.append(subprocess.Popen(command, env=environment(machine, folder), cwd=folder))
        time.sleep(1)  # in the same second they would all take the same GPU
    for program in programs:
        assert program.wait() == 0
    return time.perf_counter() - started


def cpu_seconds() -> float:
    """User and system time of every program that was run so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def held_by_jobs(folder: Path) -> list[dict[str, Any]]:
    """What the jobs wrote down when they took a GPU and gave it back, in order."""
    return [json.loads(line) for line in (folder / "held.jsonl").read_text().splitlines()]


def between_jobs(folder: Path) -> tuple[list[float], int]:
    """Seconds from each job's end to the next one on the same GPU; GPUs taken while held."""
    held: dict[str, int] = {}
    given: dict[str, float] = {}
    gaps: list[float] = []
    twice = 0
    for event in held_by_jobs(folder):
        gpu = event["gpu"]
        if event["event"] == "take":
            twice += held.get(gpu, 0) > 0
            if gpu in given and not held.get(gpu):
                gaps.append(event["time"] - given[gpu])
            held[gpu] = held.get(gpu, 0) + 1
        else:
            given[gpu] = event["time"]
            held[gpu] -= 1
    return gaps, twice


def what_the_log_says(folder: Path, started: float, ended: float) -> str:
    """Where the time went, and how often a GPU was taken while another job held it."""
    events = held_by_jobs(folder)
    idle, times = between_jobs(folder)
    longest = max(idle, default=0.0)
    return (
        f"first job at work after {events[0]['time'] - started:.1f} s, a GPU idle between two jobs "
        f"for {longest:.1f} s at most, end {ended - events[-1]['time']:.1f} s after the last job; "
        f"GPUs taken while held: {times}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job-seconds", type=float, default=30)
    parser.add_argument("--poll-seconds", type=float, default=30)
    parser.add_argument("--no-poll", action="store_true", help="the sweeps only")
    arguments = parser.parse_args()
    lengths = [length * arguments.job_seconds for length in LENGTHS]
    best = perfect_packing(lengths)
    print(f"4 jobs of {', '.join(f'{s:g}' for s in lengths)} s on {GPUS} GPUs")
    print(f"perfect packing: {best:.1f} s")
    with tempfile.TemporaryDirectory() as name:
        libraries = build_nvml(Path(name) / "libraries").parent
        folder = Path(name) / "one"
        folder.mkdir()
        machine = Machine(folder, libraries, [Gpu() for _ in range(GPUS)])
        one_job(machine, folder)  # warms the disk cache
        before = cpu_seconds()
        starts = [one_job(machine, folder) for _ in range(3)]
        cpu = (cpu_seconds() - before) / len(starts)
        print(
            f"a single job that takes no time: {statistics.median(starts):.1f} s, {cpu:.1f} s CPU"
        )
        variants = {
            "sweep, a job for each GPU at once": lambda m, f: sweep(m, f, lengths),
            "sweep, all jobs in the queue at once": lambda m, f: sweep(
                m, f, lengths, f"hydra.launcher.n_jobs={len(lengths)}"
            ),
        }
        if not arguments.no_poll:
            variants[f"plain poll every {arguments.poll_seconds:g} s"] = lambda m, f: plain_poll(
                m, f, lengths, arguments.poll_seconds
            )
        for number, (title, variant) in enumerate(variants.items()):
            folder = Path(name) / str(number)
            folder.mkdir()
            machine = Machine(folder, libraries, [Gpu() for _ in range(GPUS)])
            started, before = time.time(), cpu_seconds()
            try:
                seconds = variant(machine, folder)
            except subprocess.CalledProcessError as error:
                print(error.stdout.decode(), error.stderr.decode(), file=sys.stderr)
                raise
            ratio = f"{seconds / best:.3f} × perfect packing (goal: 1.12 or less)"
            print(f"{title}: {seconds:.1f} s, {ratio}; {cpu_seconds() - before:.1f} s CPU")
            print(f"  {what_the_log_says(folder, started, time.time())}")


if __name__ == "__main__":
    main()
