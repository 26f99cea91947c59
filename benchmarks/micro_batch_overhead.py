"""What ``run.backward`` costs a step in which memory suffices; with ``--frameworks``, what the
integrations cost a step of accelerate, Lightning and transformers; with ``--check``, what the check
of a split costs, once.

Run: python benchmarks/micro_batch_overhead.py [--steps 200] [--device cpu]
     python benchmarks/micro_batch_overhead.py --frameworks [--steps 50] [--rounds 6]
     python benchmarks/micro_batch_overhead.py --check [--steps 50] [--device cpu]
Goal: at most 1 % of a small network's step.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from robust_train.step.batcher import MicroBatcher
from robust_train.step.split_checker import check_split


def small_cnn() -> nn.Module:
    """Three convolutions with BatchNorm, whose statistics are what has to be remembered."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))


Step = Callable[[], None]


def steps_to_compare(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[Step, Step, Step]:
    """A plain step, one with ``backward``, and the latter without any work in it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batcher = MicroBatcher(len(x))

    def plain() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        part, labels = batch
        return nn.functional.cross_entropy(model(part), labels)

    def split() -> None:
        optimizer.zero_grad()
        batcher.backward(loss_of, (x, y), model)
        optimizer.step()

    zero = torch.zeros((), device=x.device)

    def nothing() -> None:
        batcher.backward(lambda part: zero, (x, y), model, backward=lambda loss: None)

    return plain, split, nothing


def compare_frameworks(steps: int, rounds: int, length: int) -> None:
    """Print the CPU time from one optimizer step to the next in a framework's own loop and with
    ours: the machine may be busy."""
    import recovery_peers as peers
    from recovery_job import Job

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # others spin while they wait
    job = Job("first", steps=steps, length=length)
    ended: list[float] = []
    register_optimizer_step_post_hook(lambda *ignored: ended.append(time.process_time()))

    def step_times(fit: Callable[[Job, Path], object]) -> list[float]:
        ended.clear()
        silence = contextlib.redirect_stdout(io.StringIO())
        with tempfile.TemporaryDirectory() as folder, silence:
            fit(job, Path(folder))
        assert len(ended) == steps
        # the first ones warm up
        return [after - before for before, after in pairwise(ended[2:])]

    for name, plain, ours in (
        ("accelerate", peers.accelerate_plain, peers.accelerate_in_step),
        ("Lightning", peers.lightning_plain, peers.lightning_in_step),
        ("transformers", peers.transformers_plain, peers.transformers_in_step),
    ):
        step_times(plain), step_times(ours)  # imports
        pairs = [(step_times(plain), step_times(ours)) for _ in range(rounds)]
        before, after = (
            statistics.quantiles([seconds for times in side for seconds in times])[0]
            for side in zip(*pairs, strict=True)
        )
        print(
            f"{name}: {before * 1e3:.2f} ms of CPU time a step by itself, {after * 1e3:.2f} ms "
            f"with ours: × {after / before:.3f}, {(after - before) * 1e6:+.0f} µs "
            f"(lower quartiles of {rounds} × {steps} steps, alternating)",
            flush=True,
        )


def compare_check(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    seconds: Callable[[Step], float],
    rounds: int,
) -> None:
    """Print the time of a check of a split into halves, and of a plain step of the whole batch."""

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        part, labels = batch
        return nn.functional.cross_entropy(model(part), labels)

    def check() -> None:
        found = check_split(loss_of, (x, y), model)
        assert found.is_kept, found.message

    plain, _, _ = steps_to_compare(model, x, y)
    plain(), check()
    pairs = [(seconds(plain), seconds(check)) for _ in range(rounds)]
    step, once = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(f"plain step: {step * 1e3:.3f} ms (median of {rounds}, interleaved)")
    print(f"a check, once: {once * 1e3:.3f} ms ({once / step:.2f} steps)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--frameworks", action="store_true")
    parser.add_argument("--check", action="store_true", help="of a split, into halves")
    parser.add_argument("--rounds", type=int, default=6, help="of each framework")
    parser.add_argument("--length", type=int, default=44, help="of their samples")
    chosen = parser.parse_args()
    if chosen.frameworks:
        compare_frameworks(chosen.steps or 50, chosen.rounds, chosen.length)
        return
    chosen.steps = chosen.steps or 200
    device = torch.device(chosen.device)
    torch.manual_seed(0)
    model = small_cnn().to(device)
    x, y = (torch.randn(64, 3, 32, 32, device=device), torch.randint(10, (64,), device=device))
    plain, split, nothing = steps_to_compare(model, x, y)

    def seconds(step: Step) -> float:
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    if chosen.check:
        compare_check(model, x, y, seconds, chosen.steps)
        return
    for _ in range(5):
        plain(), split()
    pairs = [(seconds(plain), seconds(split)) for _ in range(chosen.steps)]
    before, after = (statistics.median(times) for times in zip(*pairs, strict=True))
    alone = statistics.median(seconds(nothing) for _ in range(chosen.steps))
    print(f"plain step: {before * 1e3:.3f} ms (median of {chosen.steps}, interleaved)")
    print(f"with backward: {after * 1e3:.3f} ms ({100 * (after / before - 1):+.2f} %)")
    print(f"backward alone: {alone * 1e6:.0f} µs ({100 * alone / before:.2f} %; goal: 1 %)")


if __name__ == "__main__":
    main()
