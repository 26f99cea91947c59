"""Finding the largest batch that fits: probes and result, ours beside doubling and bisection.

Run: python benchmarks/auto_batch.py [--limit-mib 200] [--at-most 256]

Each contestant looks for the largest batch of a built-in model's forward and backward pass in a
process whose private memory (RLIMIT_DATA) may grow by so much. ``robust-train`` is
``find_batch_size``; ``doubling and bisection`` is what Lightning's batch-size finder does in the
mode ``binsearch``: double from 2 until memory runs out, then halve the interval (there each try is
three steps, and the model is reloaded from a checkpoint after the last). What bisection ends at
counts as the largest: the heap's holes differ from try to try, so another may fit a little more.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

MODELS = {
    "cnn, 96 × 96": ("model=cnn", "model.image_size=96"),
    "linear_probe, ViT-Tiny": (
        "model=linear_probe",
        "model.backbone=vit_tiny_patch16_224",
        "model.pretrained=false",
    ),
    "full_finetune, ViT-Tiny": (
        "model=full_finetune",
        "model.backbone=vit_tiny_patch16_224",
        "model.pretrained=false",
    ),
}
MIB = 2**20


def measure(overrides: list[str], contestant: str, limit_mib: int, at_most: int) -> None:
    """One contestant in this process: its answer, its probes and its seconds as a JSON line."""
    import torch
    from hydra import compose, initialize_config_module

    from robust_train import find_batch_size
    from robust_train.memory.clearing import return_memory
    from robust_train.vision.datasets import Shape
    from robust_train.vision.models import build_model, set_train_mode

    torch.manual_seed(0)
    torch.set_num_threads(1)
    with initialize_config_module("robust_train.configs", version_base="1.3"):
        cfg = compose("config", overrides=overrides)
    model, _ = build_model(cfg.model, Shape(num_classes=10, size=8, channels=3))
    set_train_mode(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side = int(cfg.model.image_size)
    x, y = torch.randn(at_most, 3, side, side), torch.zeros(at_most, dtype=torch.long)

    def step(size: int) -> None:
        torch.nn.functional.cross_entropy(model(x[:size]), y[:size]).backward()

    step(1)  # libraries and threads are there before the limit is
    optimizer.zero_grad()
    used = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmData")
    )
    resource.setrlimit(resource.RLIMIT_DATA, (used + limit_mib * MIB, resource.RLIM_INFINITY))
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        try:
            step(size)
        except RuntimeError:
            return False
        finally:
            optimizer.zero_grad()
            return_memory()
        return True

    def counted(size: int) -> None:
        tried.append(size)
        step(size)

    started = time.perf_counter()
    if contestant == "robust-train":
        found = find_batch_size(counted, at_most, model=model).batch_size or 0
    else:
        found = doubling_and_bisection(fits, at_most)
    seconds = time.perf_counter() - started
    print(json.dumps({"found": found, "tried": tried, "seconds": seconds}))


def doubling_and_bisection(fits: Callable[[int], bool], at_most: int) -> int:
    """Double from 2 until it does not fit, then bisect."""
    low, high = 0, at_most + 1
    size = 2
    while size < high:
        if not fits(size):
            high = size
            break
        low, size = size, min(2 * size, at_most) if size < at_most else high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit-mib", type=int, default=200)
    parser.add_argument("--at-most", type=int, default=256)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--one", nargs=2, metavar=("CONTESTANT", "OVERRIDES"))
    chosen = parser.parse_args()
    if chosen.one:
        contestant, overrides = chosen.one
        measure(json.loads(overrides), contestant, chosen.limit_mib, chosen.at_most)
        return
    print("| model | contestant | probes | found | ÷ largest | seconds |")
    print("|---|---|---|---|---|---|")
    for name in chosen.only:
        rows = {}
        for contestant in ("robust-train", "doubling and bisection"):
            ended = subprocess.run(
                [
                    sys.executable,
                    __file__,
                    "--limit-mib",
                    str(chosen.limit_mib),
                    "--at-most",
                    str(chosen.at_most),
                    "--one",
                    contestant,
                    json.dumps(MODELS[name]),
                ],
                # freed blocks go back at once, so that the limit is one on what is held
                env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
                stdout=subprocess.PIPE,
                check=True,
                text=True,
            )
            rows[contestant] = json.loads(ended.stdout.splitlines()[-1])
        # bisection ends at the largest size that goes through
        largest = rows["doubling and bisection"]["found"]
        for contestant, row in rows.items():
            print(
                f"| {name} | {contestant} | {len(row['tried'])} | {row['found']} | "
                f"{row['found'] / largest:.2f} | {row['seconds']:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
