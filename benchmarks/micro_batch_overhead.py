"""What ``run.micro_batches`` costs a step in which memory suffices.

Run: python benchmarks/micro_batch_overhead.py [--steps 200] [--device cpu]
Goal: at most 1 % of a small network's step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from robust_train.microbatch.batcher import MicroBatcher


def small_cnn() -> nn.Module:
    """Three convolutions with BatchNorm, whose statistics are what has to be remembered."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))


Step = Callable[[], None]


def steps_to_compare(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[Step, Step, Step]:
    """A plain step, one with ``micro_batches``, and the latter without any work in it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batcher = MicroBatcher(len(x))

    def plain() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    def split() -> None:
        optimizer.zero_grad()
        for micro in batcher.micro_batches((x, y), model):
            with micro:
                part, labels = micro.data
                micro.backward(nn.functional.cross_entropy(model(part), labels))
        optimizer.step()

    def nothing() -> None:
        for micro in batcher.micro_batches((x, y), model):
            with micro:
                pass

    return plain, split, nothing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    torch.manual_seed(0)
    model = small_cnn().to(device)
    x, y = torch.randn(64, 3, 32, 32, device=device), torch.randint(10, (64,), device=device)
    plain, split, nothing = steps_to_compare(model, x, y)

    def seconds(step: Step) -> float:
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    for _ in range(5):
        plain(), split()
    pairs = [(seconds(plain), seconds(split)) for _ in range(chosen.steps)]
    before, after = (statistics.median(times) for times in zip(*pairs, strict=True))
    alone = statistics.median(seconds(nothing) for _ in range(chosen.steps))
    print(f"plain step: {before * 1e3:.3f} ms (median of {chosen.steps}, interleaved)")
    print(f"with micro_batches: {after * 1e3:.3f} ms ({100 * (after / before - 1):+.2f} %)")
    print(f"micro_batches alone: {alone * 1e6:.0f} µs ({100 * alone / before:.2f} %; goal: 1 %)")


if __name__ == "__main__":
    main()
