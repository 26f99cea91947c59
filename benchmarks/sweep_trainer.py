"""Holds memory of a simulated GPU for as long as its job is to take."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from pathlib import Path

HELD_BYTES = 36_000 * 1024**2


def train(cfg):
    hold(os.environ["CUDA_VISIBLE_DEVICES"], cfg.seconds)
    return cfg.seconds


def hold(uuid: str, seconds: float) -> None:
    """Take a GPU's memory, wait, give it back."""
    until = time.monotonic() + seconds
    _change(uuid, HELD_BYTES)
    _tell("take", uuid)
    time.sleep(max(until - time.monotonic(), 0))
    _tell("give", uuid)
    _change(uuid, -HELD_BYTES)


def _tell(event: str, uuid: str) -> None:
    with open(os.environ["SWEEP_BENCHMARK_LOG"], "a") as file:
        file.write(json.dumps({"event": event, "gpu": uuid, "time": time.time()}) + "\n")


def _change(uuid: str, taken: int) -> None:
    """Change what the simulated library says is used and free, as one step."""
    state = Path(os.environ["SIMULATED_NVML_STATE"])
    with state.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = state.read_text()
        found = re.search(rf"^gpu\.(\d+)\.uuid {re.escape(uuid)}$", text, re.MULTILINE)
        assert found is not None, uuid
        for key, change in (("used", taken), ("free", -taken)):
            pattern = rf"^(gpu\.{found[1]}\.{key}) (-?\d+)$"
            text = re.sub(
                pattern,
                lambda match, change=change: f"{match[1]} {max(int(match[2]) + change, 0)}",
                text,
                flags=re.MULTILINE,
            )
        new = state.with_suffix(".next")
        new.write_text(text)
        new.replace(state)


def sleeps(cfg, run):
    """Work for two steps of half a second, with a checkpoint between them."""
    at = run.resume_checkpoint
    if at is None:
        time.sleep(0.5)
        run.checkpoint_dir.mkdir(exist_ok=True)
        at = run.checkpoint_dir / "half"
        at.touch()
        run.checkpoint_saved(at, 1)
    time.sleep(0.5)
    with open(os.environ["SWEEP_BENCHMARK_LOG"], "a") as file:
        file.write(f"{run.run_dir.name}\n")
    return -((cfg.training.lr - 1) ** 2)
