"""What the memory sampler costs the training beside it.

Blocks of the same steps are run in turn without and with a sampler, in one process; the order
changes from round to round. Two kinds of steps: a small convolutional network, and Python alone,
whose thread has to hand over the interpreter for every sample. The sampler asks NVML as well: a
simulated library where there is no GPU (needs a C compiler then). On a GPU it asks torch too.

Run: python benchmarks/sampler.py [--rounds 20] [--interval-ms 100]
Goal: at most 0.5 % of the wall time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))


@dataclass
class Block:
    """What one block of steps took: wall, CPU of the process, CPU of the sampler's thread."""

    wall: float
    cpu: float
    sampler: float = 0.0


def network(device: str) -> Callable[[], None]:
    """A step of a small convolutional network."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = (torch.randn(16, 3, 32, 32, device=device), torch.randint(10, (16,), device=device))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if device != "cpu":
            torch.cuda.synchronize()

    return step


def python_alone(device: str) -> Callable[[], None]:
    """A step that never lets go of the interpreter by itself."""
    return lambda: sum(number * number for number in range(50_000)) and None


def block(step: Callable[[], None], count: int, device: str, interval: float | None) -> Block:
    """So many steps, with a sampler or without."""
    from robust_train.features.memory_samples.sampler import Sampler

    with tempfile.TemporaryDirectory() as folder:
        sampler = (
            None
            if interval is None
            else Sampler(Path(folder), 1, device, lambda: 1, interval_seconds=interval)
        )
        if sampler is not None:
            sampler.start()
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(count):
            step()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if sampler is None:
            return Block(wall, cpu)
        clock = time.pthread_getcpuclockid(sampler._thread.ident)
        own = time.clock_gettime(clock)
        sampler.stop()
        return Block(wall, cpu, own)


def measure(
    name: str,
    step: Callable[[], None],
    device: str,
    rounds: int,
    interval: float,
    block_seconds: float,
) -> None:
    """Print what the rounds say; twice without a sampler, to show how much the machine varies."""
    step()
    started = time.perf_counter()
    for _ in range(10):
        step()
    count = max(int(10 * block_seconds / (time.perf_counter() - started)), 1)
    block(step, count, device, interval)
    ratios: dict[str, list[float]] = {"with it": [], "without it once more": []}
    own = []
    for number in range(rounds):
        ways = {"without": None, "with it": interval, "without it once more": None}
        order = list(ways) if number % 2 else list(reversed(ways))
        blocks = {way: block(step, count, device, ways[way]) for way in order}
        for way, values in ratios.items():
            values.append(100 * (blocks[way].cpu / blocks["without"].cpu - 1))
        own.append(100 * blocks["with it"].sampler / blocks["with it"].wall)
    low, median, high = statistics.quantiles(own, n=4)
    print(
        f"{name}: CPU time of the sampler's thread ÷ wall time: {median:.3f} % "
        f"(middle half {low:.3f} to {high:.3f})"
    )
    for way, values in ratios.items():
        low, median, high = statistics.quantiles(values, n=4)
        print(
            f"  CPU time of the process {way}, against without: {median:+.2f} % "
            f"(middle half {low:+.2f} to {high:+.2f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--interval-ms", type=float, default=100)
    parser.add_argument("--block-seconds", type=float, default=1)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure:
        device = chosen.measure
        trained_on = "cpu" if os.environ.get("SIMULATED_NVML_STATE") else device
        for name, make in (("network", network), ("Python alone", python_alone)):
            step = make(trained_on)
            interval = chosen.interval_ms / 1000
            measure(name, step, device, chosen.rounds, interval, chosen.block_seconds)
        return
    from robust_train.gpu.inventory import read_inventory

    command = [sys.executable, __file__, f"--rounds={chosen.rounds}"]
    command += [f"--interval-ms={chosen.interval_ms}", f"--block-seconds={chosen.block_seconds}"]
    gpus = read_inventory(processes=False).gpus
    if gpus:
        print(f"on {gpus[0].name}, NVML and torch asked")
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus[0].uuid}
        subprocess.run([*command, "--measure=cuda:0"], env=environ, check=True)
        return
    print("on the CPU, without NVML")
    subprocess.run([*command, "--measure=cpu"], check=True)
    if shutil.which("cc") is None:
        print("no C compiler (cc): the simulated NVML cannot be built")
        return
    from simulated_nvml import Gpu, Machine, build_nvml

    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(Path(folder), build_nvml(Path(folder) / "libraries").parent, [Gpu()])
        print("on the CPU, a simulated NVML asked")
        environ = {**os.environ, **machine.environ, "CUDA_VISIBLE_DEVICES": machine.uuid(0)}
        del environ["SIMULATED_NVML_CALLS"]  # writing a log would be most of the time
        subprocess.run([*command, "--measure=cuda:0"], env=environ, check=True)


if __name__ == "__main__":
    main()
