"""What emptying the CUDA cache costs a training step, on a GPU.

Blocks of the same steps, in turn: never emptied; emptied after every step; after every tenth; and
as ``memory.empty_cache_frequency=10`` does it, which gets rare where it does not last.

Run: python benchmarks/empty_cache.py [--steps 200] [--rounds 5]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from robust_train.attempt.run import Run, live_of
from robust_train.config.schema import MemoryConfig, RobustConfig
from robust_train.features.memory_upkeep.attempt import MemoryUpkeep
from robust_train.memory.clearing import return_memory

AfterStep = Callable[[int], None]


def training() -> Callable[[], None]:
    """A step of a convolutional network whose activations are much larger than its weights."""
    layers: list[nn.Module] = []
    for before, after in ((3, 64), (64, 128), (128, 256), (256, 256)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100))
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = (torch.randn(64, 3, 128, 128, device="cuda"), torch.randint(100, (64,), device="cuda"))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def steered(folder: Path) -> AfterStep:
    """As a run does it."""
    run = Run(run_dir=folder)
    config = RobustConfig(device="cuda:0", memory=MemoryConfig(fraction=1.0))
    live = live_of(run)
    upkeep = MemoryUpkeep(live, config)
    live.take_part([upkeep])
    steps = itertools.count(1)
    return lambda number: run.progress(next(steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/empty_cache.py: needs a GPU that torch can use; there is none here")
    step = training()
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, AfterStep] = {
            "never": lambda number: None,
            "every step": lambda number: return_memory(thorough=False),
            "every tenth": lambda number: None if number % 10 else return_memory(thorough=False),
            "as a run does": steered(Path(folder)),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(10):
            step()
        for _ in range(chosen.rounds):
            for way, after_step in ways.items():
                torch.cuda.synchronize()
                started = time.perf_counter()
                for number in range(1, chosen.steps + 1):
                    step()
                    after_step(number)
                torch.cuda.synchronize()
                seconds[way].append((time.perf_counter() - started) / chosen.steps)
    never = statistics.median(seconds["never"])
    for way, values in seconds.items():
        took = statistics.median(values)
        print(f"{way}: {1000 * took:.2f} ms a step, {100 * (took / never - 1):+.1f} %")


if __name__ == "__main__":
    main()
