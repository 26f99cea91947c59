"""The trainer of ``goodput.py``: steps that take a known time, checkpoints of a known size.

Under our launcher it is :func:`train`; under torchrun it runs as a script with a clock of its own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEP_SECONDS = 0.05


def steps(folder: Path, first: int, save: Callable[[int], None]) -> None:
    """Train for ever from step ``first``; ``save`` is asked after each step and saves if due."""
    (folder / "pid").write_text(str(os.getpid()))
    step, counter = first, os.open(folder / "step", os.O_WRONLY | os.O_CREAT)
    while True:
        time.sleep(STEP_SECONDS)
        step += 1
        os.pwrite(counter, b"%12d" % step, 0)  # whole at every moment
        save(step)


def weights(megabytes: int) -> dict[str, Any]:
    """Return so many MB of tensors."""
    import torch

    return {"weights": torch.rand(megabytes * 250_000)}


def train(cfg: Any, run: Any) -> None:
    """The trainer under our launcher: default settings."""
    folder, state = run.run_dir.parent, weights(cfg.megabytes)

    def save(step: int) -> None:
        run.progress(step)
        if run.should_save():
            run.save(state, step)

    steps(folder, run.load(state), save)


def alone(folder: Path, every_seconds: float, megabytes: int) -> None:
    """The same under torchrun, with a checkpoint every so many seconds."""
    import torch

    content, path = weights(megabytes), folder / "last.pt"
    first = torch.load(path)["step"] if path.exists() else 0
    saved_at = time.monotonic()

    def save(step: int) -> None:
        nonlocal saved_at
        if time.monotonic() - saved_at < every_seconds:
            return
        temporary = path.with_suffix(".tmp")
        torch.save({**content, "step": step}, temporary)
        temporary.replace(path)
        saved_at = time.monotonic()

    steps(folder, first, save)


if __name__ == "__main__":
    alone(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
