"""Start-up and steady overhead of train_robust.py against train.py.

Run: python benchmarks/startup.py [--runs 5] [--job-seconds 60]
Goals: at most 0.5 s more to start; at most 1.05 × the wall time of a 60 s job.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = ("train.py", "train_robust.py")


def wall(script: str, *overrides: str) -> float:
    """Wall seconds of one whole command."""
    environ = {**os.environ, "PYTHONPATH": str(HERE)}
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, str(HERE.parent / script), *overrides, f"hydra.run.dir={folder}/run"],
            env=environ,
            cwd=folder,
            check=True,
            capture_output=True,
        )
        return time.perf_counter() - started


def side_by_side(runs: int, *overrides: str) -> dict[str, float]:
    """Median wall seconds of each script, run in turn."""
    times: dict[str, list[float]] = {script: [] for script in SCRIPTS}
    for _ in range(runs):
        for script in SCRIPTS:
            times[script].append(wall(script, *overrides))
    return {script: statistics.median(values) for script, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--job-seconds", type=float, default=60)
    arguments = parser.parse_args()

    side_by_side(1, "trainer._target_=trainers.nothing")
    start = side_by_side(arguments.runs, "trainer._target_=trainers.nothing")
    plain, robust = (start[script] for script in SCRIPTS)
    print(f"start with an empty trainer: train.py {plain:.2f} s, train_robust.py {robust:.2f} s")
    print(f"difference: {robust - plain:+.2f} s (goal: 0.5 s or less)")

    if arguments.job_seconds > 0:
        few = wall("train.py", "training.epochs=2")
        per_epoch = (wall("train.py", "training.epochs=12") - few) / 10
        epochs = max(1, round(arguments.job_seconds / per_epoch))
        job = side_by_side(2, f"training.epochs={epochs}")
        plain, robust = (job[script] for script in SCRIPTS)
        print(f"digits, {epochs} epochs: train.py {plain:.1f} s, train_robust.py {robust:.1f} s")
        print(f"ratio: {robust / plain:.3f} (goal: 1.05 or less)")


if __name__ == "__main__":
    main()
