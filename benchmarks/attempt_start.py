"""Time from the decision to the trainer's first line, against a cold interpreter.

Run: python benchmarks/attempt_start.py [--runs 5]
Each attempt trains for so long that the standby has imported what it needs.
Goal: a retry is at least 10 × faster than an interpreter that starts and imports the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
COLD = "import time, trainers; print(time.time())"


def job(folder: Path, seconds: float) -> tuple[float, list[float]]:
    """Seconds from the launcher's start to the first attempt, and from each decision to a retry.

    ``seconds``: how long each attempt trains.
    """
    environ = {**os.environ, "PYTHONPATH": str(HERE)}
    run_dir = folder / "run"
    started = time.time()
    subprocess.run(
        [
            sys.executable,
            str(HERE.parent / "train_robust.py"),
            "trainer._target_=trainers.first_line",
            "training.batch_size=256",
            "max_retries=10",
            "allow_cpu_fallback=true",
            f"hydra.run.dir={run_dir}",
        ],
        env={**environ, "CUDA_VISIBLE_DEVICES": "", "TRAINS_SECONDS": str(seconds)},
        cwd=folder,
        check=True,
        capture_output=True,
    )
    events = [json.loads(line) for line in (run_dir / "journal.jsonl").open()]
    reached = [e["fields"]["at"] for e in events if e.get("event_name") == "first_line"]
    decided = [event["time"] for event in events if event["event"] == "attempt_ended"]
    return reached[0] - started, [b - a for a, b in zip(decided, reached[1:], strict=False)]


def cold() -> float:
    """Seconds from the start of an interpreter until it has imported torch and the trainer."""
    started = time.time()
    output = subprocess.run(
        [sys.executable, "-c", COLD],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return float(output) - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    firsts, retries, colds = [], [], []
    cold()  # warms the disk cache
    for _ in range(runs):
        colds.append(cold())
        with tempfile.TemporaryDirectory() as folder:
            first, more = job(Path(folder), 4 * colds[-1])
        firsts.append(first)
        retries += more
    interpreter, retry = statistics.median(colds), statistics.median(retries)
    print(f"cold interpreter with the same imports: {interpreter:.3f} s (median of {runs})")
    print(f"launcher's start to the first attempt's first line: {statistics.median(firsts):.3f} s")
    print(f"decision to a retry's first line: {retry * 1000:.1f} ms (median of {len(retries)})")
    print(f"cold interpreter ÷ retry: {interpreter / retry:.0f} × (goal: 10 × or more)")


if __name__ == "__main__":
    main()
