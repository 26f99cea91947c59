"""Choosing a GPU against a bare NVML loop, on a simulated machine with eight GPUs.

The bare loop asks nvidia-ml-py for what a choice by free memory cannot do without: the count, and
each GPU's handle, UUID and memory. The selection is the launcher's and ``find_best_device``'s:
inventory, CUDA_VISIBLE_DEVICES and choice, without process lists, asked in a thread that can be
left behind should the driver hang. Needs a C compiler, no GPU.

Run: python benchmarks/selection_latency.py [--rounds 2000]
Goal: at most 2.5 × the bare loop, most of it for the thread.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

GPUS = 8
MIN_BYTES = 4000 * 1024**2


def bare() -> str:
    """UUID of the GPU with the most free memory, by plain calls."""
    import pynvml

    best, most = "", -1
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = pynvml.nvmlDeviceGetUUID(handle)
        free = pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2).free
        if free >= MIN_BYTES and free > most:
            best, most = uuid, free
    return best


def selection() -> str:
    """UUID of the GPU that ``find_best_device`` and the launcher take."""
    from robust_train.gpu.inventory import read_inventory
    from robust_train.gpu.select import rank
    from robust_train.gpu.visible import visible_gpus

    inventory = read_inventory(processes=False)
    return rank(visible_gpus(inventory, os.environ).gpus, MIN_BYTES)[0].uuid


def measure(rounds: int) -> None:
    """Both in turn, on the machine that the environment describes."""
    import pynvml

    pynvml.nvmlInit()
    ways = (bare, selection)
    assert bare() == selection()
    seconds: dict[str, list[float]] = {way.__name__: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            started = time.perf_counter()
            way()
            seconds[way.__name__].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        print(f"{name}: median {median * 1e6:.0f} µs for {GPUS} GPUs, {rounds} rounds")
    print(f"ratio: {medians['selection'] / medians['bare']:.2f} (goal: 2.5 or less)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--on-machine", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.on_machine:
        measure(arguments.rounds)
        return

    from simulated_nvml import Gpu, Machine, build_nvml

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gpus = [Gpu(free_mib=8000 + 1000 * (index % 5)) for index in range(GPUS)]
        machine = Machine(folder, build_nvml(folder / "libraries").parent, gpus)
        environ = machine.environment()
        del environ["SIMULATED_NVML_CALLS"]  # writing a log would be most of the time
        # the library path counts from a program's start only
        command = [sys.executable, __file__, "--on-machine", "--rounds", str(arguments.rounds)]
        subprocess.run(command, env=environ, check=True)


if __name__ == "__main__":
    main()
