"""Training time that a checkpoint costs, ÷ the time of a copy to host memory.

    python benchmarks/save_stall.py [--gigabytes 1 4] [--saves 5] [--device cpu]

A loop of steps of some 20 ms (one thread) saves a state of so many gigabytes. Lost is the time from
a save until its file is there, less that of as many steps without one: the call, and what the steps
that follow are slower. Contestants: ``run.save``, ``torch.save``, and torch's distributed
checkpoints (DCP), synchronous and asynchronous. Goal: ``run.save`` at 1.2 copies or less.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from robust_train.attempt.run import Run, live_of
from robust_train.model.events import CheckpointSaved, Event

TENSORS = 64
Save = Callable[[int], Callable[[], bool]]
"""Begins a save; returns whether it is done."""


def state_of(gigabytes: float, device: str) -> dict[str, torch.Tensor]:
    """Return so many GB in tensors."""
    size = int(gigabytes * 1e9 / 4 / TENSORS)
    return {f"layer{n}": torch.rand(size, device=device) for n in range(TENSORS)}


def seconds_of_copy(state: dict[str, torch.Tensor]) -> float:
    """Return the time of a copy into host memory that is there already."""
    host = {
        name: torch.empty_like(one, device="cpu", pin_memory=one.is_cuda)
        for name, one in state.items()
    }
    times = []
    for _ in range(4):  # the first one is for the pages
        started = time.perf_counter()
        for name, one in state.items():
            host[name].copy_(one, non_blocking=one.is_cuda)
        if one.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


class Steps:
    """A step that takes about 20 ms, on the same device as the state."""

    def __init__(self, device: str) -> None:
        self._a = torch.rand(512, 512, device=device)
        self._device = device
        self._times = 1
        while self.seconds(5) < 0.02:
            self._times *= 2

    def __call__(self) -> None:
        """Train for a step."""
        for _ in range(self._times):
            self._a = (self._a @ self._a).clamp_(0, 1)
        if self._device != "cpu":
            torch.cuda.synchronize()

    def seconds(self, count: int) -> float:
        """Return the median of so many steps."""
        times = []
        for _ in range(count):
            started = time.perf_counter()
            self()
            times.append(time.perf_counter() - started)
        return statistics.median(times)


def lost(steps: Steps, save: Save, saves: int) -> float:
    """Return the median of the seconds that a save costs; the first one is for the buffers."""
    found = []
    for number in range(saves + 1):
        usual = steps.seconds(40)
        started, done = time.perf_counter(), 0
        is_written = save(number)
        while not is_written():
            steps()
            done += 1
        found.append(time.perf_counter() - started - done * usual)
    return statistics.median(found[1:])


def contestants(folder: Path, state: dict[str, Any]) -> dict[str, Save]:
    """Return how each of them saves."""
    events: list[Event] = []
    run = Run(run_dir=folder / "run", report=events.append)
    live_of(run).saving.job = "benchmark"

    def ours(number: int) -> Callable[[], bool]:
        run.save(state, number)

        def is_written() -> bool:
            live_of(run).saves.finish(wait=False)
            saved = [one.step for one in events if isinstance(one, CheckpointSaved)]
            return number in saved

        return is_written

    def torchs(number: int) -> Callable[[], bool]:
        with (folder / "plain.tmp").open("wb") as file:
            torch.save(state, file)
            os.fsync(file.fileno())
        (folder / "plain.tmp").replace(folder / "plain.pt")
        return lambda: True

    def sharded(number: int) -> Callable[[], bool]:
        dcp.save(state, checkpoint_id=str(folder / f"dcp-{number % 2}"))
        return lambda: True

    def in_background(number: int) -> Callable[[], bool]:
        future: Any = dcp.async_save(state, checkpoint_id=str(folder / f"async-{number % 2}"))
        return lambda: bool(future.done())

    return {
        "run.save": ours,
        "torch.save": torchs,
        "DCP": sharded,
        "DCP, async_save": in_background,
    }


def main() -> None:
    """Print a line for each size and contestant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1, 4])
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", help="contestants")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Detected an existing checkpoint")
    with tempfile.TemporaryDirectory() as store:
        dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=0, world_size=1)
        steps = Steps(chosen.device)
        for gigabytes in chosen.gigabytes:
            state = state_of(gigabytes, chosen.device)
            copy = seconds_of_copy(state)
            print(f"{gigabytes:g} GB: a copy takes {copy:.2f} s", flush=True)
            names = contestants(Path(store), state)
            for name in chosen.only or names:
                folder = Path(tempfile.mkdtemp())
                try:
                    save = contestants(folder, state)[name]
                    seconds = lost(steps, save, chosen.saves)
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                print(
                    f"  {name:<16} {seconds:6.2f} s lost a save = {seconds / copy:5.2f} copies",
                    flush=True,
                )
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
