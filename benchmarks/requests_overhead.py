"""What a run that takes requests pays for it in every step in which there are none.

Run: python benchmarks/requests_overhead.py [--steps 2000]
Goal: not to be measured in a small network's step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from robust_train.attempt.run import Run, live_of
from robust_train.attempt.runner import run_ticks
from robust_train.config.schema import RobustConfig
from robust_train.config.training_plans import SavePlan
from robust_train.features.requests.attempt import Requests
from robust_train.folder.requests import open_requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(64, 64), torch.randint(10, (64,))

    def step_of(run: Run) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            boundary()

        def boundary() -> None:
            run.progress(1)
            assert not run.should_stop()
            assert not run.should_save()

        step.boundary = boundary  # type: ignore[attr-defined]
        return step

    def seconds(work: Callable[[], None]) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    with tempfile.TemporaryDirectory() as folder:
        deaf, listening = Run(run_dir=Path(folder)), Run(run_dir=Path(folder))
        for run in (deaf, listening):
            live_of(run).saving.follow(SavePlan(every_seconds=1e9))
        open_requests(Path(folder))
        live = live_of(listening)
        live.take_part([Requests(live, RobustConfig())])
        with run_ticks(live):
            plain, served = step_of(deaf), step_of(listening)
            for _ in range(50):
                plain(), served()
            pairs = [(seconds(plain), seconds(served)) for _ in range(chosen.steps)]
            boundaries = [
                (seconds(plain.boundary), seconds(served.boundary))  # type: ignore[attr-defined]
                for _ in range(chosen.steps)
            ]
    before, after = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(f"step of a run that takes no requests: {before * 1e6:.1f} µs (median)")
    print(
        f"step of a run that takes them: {after * 1e6:.1f} µs ({100 * (after / before - 1):+.2f} %)"
    )
    alone, listens = (statistics.median(times) * 1e6 for times in zip(*boundaries, strict=True))
    print(f"its three looks at the launcher's side alone: {alone:.2f} and {listens:.2f} µs")


if __name__ == "__main__":
    main()
