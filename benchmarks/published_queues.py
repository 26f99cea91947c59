"""A sweep of four jobs on two simulated GPUs, beside GPU job queues from PyPI.

The same trainer for the same times: as a sweep under ``hydra/launcher=gpu_queue``, and as four
``train.py`` commands (which start as Hydra programs do, and have no launcher) under each of the
following, which have a second try with bare jobs that import nothing and only hold memory.

- ``simple-gpu-scheduler``: hands out numbers from a fixed list and never looks at a GPU,
- ``gpusched``: places by declared memory, looking at nvidia-smi at each poll (5 s by default).

Their figures show what a queue costs: the wall time over perfect packing, and how long a GPU stays
idle between two jobs, from the end of the one to the moment when the next holds memory; the next
job's own start is included where it starts only then. Nothing here tells of what they do not
have: reservations that others see, a job's recovery, a kill in between. The GPUs' free memory
follows what the jobs hold; ``nvidia-smi`` is a script that reads the simulated machine.
Needs a C compiler, no GPU; the two come with ``pip install -e '.[bench]'``.

Run: python benchmarks/published_queues.py [--job-seconds 30] [--rounds 1]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import sweep as ours
from simulated_nvml import Gpu, Machine, build_nvml

NVIDIA_SMI = r"""#!/bin/sh
case "$1" in
*query-gpu*) exec awk '
    /^gpu\.[0-9]+\.(uuid|total|used|util) / { split($1, key, "."); told[key[2], key[3]] = $2 }
    /^gpus / { count = $2 }
    END { for (i = 0; i < count; i++) printf "%d, %s, %d, %d, %d\n", i, told[i, "uuid"],
        told[i, "total"] / 1048576, told[i, "used"] / 1048576, told[i, "util"] }
    ' "$SIMULATED_NVML_STATE" ;;
esac
"""


BARE = "import os, sweep_trainer as t; t.hold(os.environ['CUDA_VISIBLE_DEVICES'], {seconds:g})"


def commands(machine: Machine, folder: Path, lengths: list[float], bare: bool) -> list[str]:
    """The jobs for a shell. The queues export an index, where the trainer takes a UUID."""
    uuids = " ".join(f"{i}) U={machine.uuid(i)};;" for i in range(ours.GPUS))
    lines = []
    for number, seconds in enumerate(lengths):
        command = [
            sys.executable,
            str(ours.ROOT / "train.py"),
            "trainer._target_=sweep_trainer.train",
            f"+seconds={seconds:g}",
            f"hydra.run.dir={folder}/runs/{number}",
        ]
        if bare:
            command = [sys.executable, "-c", BARE.format(seconds=seconds)]
        chosen = f'case "$CUDA_VISIBLE_DEVICES" in {uuids} esac; CUDA_VISIBLE_DEVICES=$U'
        lines.append(f"{chosen} {shlex.join(command)}")
    return lines


def environment(machine: Machine, folder: Path) -> dict[str, str]:
    """As for our sweep, with this interpreter's packages wherever they lie."""
    environ = ours.environment(machine, folder)
    environ["PYTHONPATH"] = os.pathsep.join([environ["PYTHONPATH"], *filter(None, sys.path[1:])])
    return environ


def simple_gpu_scheduler(machine: Machine, folder: Path, lines: list[str]) -> None:
    """Its list is taken from the end, and it ends with its last job."""
    subprocess.run(
        [sys.executable, "-m", "simple_gpu_scheduler.scheduler", "--gpus", "0", "1"],
        input="\n".join(lines) + "\n",
        text=True,
        env=environment(machine, folder),
        cwd=folder,
        check=True,
        capture_output=True,
    )


def gpusched(machine: Machine, folder: Path, lines: list[str]) -> None:
    """With its own interval between two looks."""
    tools = folder / "bin"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(NVIDIA_SMI)
    (tools / "nvidia-smi").chmod(0o755)
    jobs = folder / "jobs.txt"
    jobs.write_text("".join(f"[vram={ours.NEED_MB}] {line}\n" for line in lines))
    environ = environment(machine, folder)
    environ["PATH"] = f"{tools}{os.pathsep}{environ['PATH']}"
    subprocess.run(
        [sys.executable, "-m", "gpusched.cli", str(jobs)],
        env=environ,
        cwd=folder,
        check=True,
        capture_output=True,
    )


PEERS = {
    "simple-gpu-scheduler": (simple_gpu_scheduler, "simple_gpu_scheduler"),
    "gpusched": (gpusched, "gpusched"),
}


def contestants() -> dict[str, Callable[[Machine, Path, list[float]], object]]:
    """Those that are installed; a line says how to get the others."""
    found: dict[str, Callable[[Machine, Path, list[float]], object]] = {
        "robust-train, hydra/launcher=gpu_queue": ours.sweep
    }
    for name, (run, module) in PEERS.items():
        if importlib.util.find_spec(module) is None:
            print(f"{name}: not installed (pip install {name})")
            continue
        for bare in (False, True):

            def one(
                machine: Machine,
                folder: Path,
                lengths: list[float],
                run: Callable[[Machine, Path, list[str]], None] = run,
                bare: bool = bare,
            ) -> None:
                run(machine, folder, commands(machine, folder, lengths, bare))

            found[f"{name}, bare jobs" if bare else name] = one
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job-seconds", type=float, default=30)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    lengths = [length * arguments.job_seconds for length in ours.LENGTHS]
    best = ours.perfect_packing(lengths)
    print(f"4 jobs of {', '.join(f'{s:g}' for s in lengths)} s on {ours.GPUS} GPUs")
    print(f"perfect packing: {best:.1f} s")
    if shutil.which("awk") is None:
        sys.exit("no awk: the simulated nvidia-smi needs it")
    with tempfile.TemporaryDirectory() as name:
        libraries = build_nvml(Path(name) / "libraries").parent
        queues = contestants()
        walls: dict[str, list[float]] = {title: [] for title in queues}
        gaps: dict[str, list[float]] = {title: [] for title in queues}
        twice = dict.fromkeys(queues, 0)
        for number in range(arguments.rounds):
            for place, (title, run) in enumerate(queues.items()):
                folder = Path(name) / f"{number}-{place}"
                folder.mkdir()
                machine = Machine(folder, libraries, [Gpu() for _ in range(ours.GPUS)])
                started = time.perf_counter()
                try:
                    run(machine, folder, lengths)
                except subprocess.CalledProcessError as error:
                    print(error.stdout, error.stderr, file=sys.stderr)
                    raise
                walls[title].append(time.perf_counter() - started)
                found, held_twice = ours.between_jobs(folder)
                gaps[title] += found
                twice[title] += held_twice
        for title, seconds in walls.items():
            wall = statistics.median(seconds)
            print(
                f"{title}: {wall:.1f} s, {wall / best:.3f} × perfect packing; a GPU idle between "
                f"two jobs for {statistics.median(gaps[title]):.1f} s, at most "
                f"{max(gaps[title]):.1f} s; GPUs taken while held: {twice[title]}"
            )


if __name__ == "__main__":
    main()
