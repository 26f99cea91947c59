"""One training in three forms: a function, ranks and (run as a program) a script.

What it learns is exact arithmetic, so that a job which lost or repeated a step ends with other
weights. It prints more than a pipe holds. From its ready step on it waits as long as it is held.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

STEPS = 100
READY_STEP = 12
SAVED_EVERY = 5


def learned(weights: int, step: int) -> int:
    """Return the weights after a step."""
    return (weights * 6364136223846793005 + step) % 2**64


def final_weights() -> str:
    """Return what an undisturbed job ends with."""
    weights = 1
    for step in range(1, STEPS + 1):
        weights = learned(weights, step)
    return str(weights)


def _step(weights: int, step: int) -> int:
    time.sleep(0.02)
    print("x" * 2000, flush=True)
    _be_held(step)
    return learned(weights, step)


def _be_held(step: int, ready_step: int = READY_STEP) -> None:
    ready = os.environ["READY_FILE"]
    if step == ready_step:
        Path(ready).write_text(str(os.getpid()))
    while step >= ready_step and Path(ready + ".hold").exists():
        time.sleep(0.02)


def _save(folder: Path, weights: int, step: int) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:03d}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps([weights, step]) + "\n")
    return partial.replace(path)


def _load(path: str | os.PathLike[str] | None) -> tuple[int, int]:
    if path is None:
        return 1, 0
    weights, step = json.loads(Path(path).read_text())
    return weights, step


def learns(cfg, run):
    """Learns, and saves every five steps and when it is stopped."""
    weights, first = _load(run.resume_checkpoint)
    run.started(first)
    for step in range(first + 1, STEPS + 1):
        weights = _step(weights, step)
        run.progress(step)
        if step % SAVED_EVERY == 0 or run.stop_requested:
            run.checkpoint_saved(_save(run.checkpoint_dir, weights, step), step)
        if run.stop_requested:
            raise KeyboardInterrupt
    Path(os.environ["WEIGHTS_FILE"]).write_text(str(weights))
    return {"weights": str(weights)}


def learns_in_ranks(cfg, run):
    """The same in several ranks, which agree on each step."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    weights, first = _load(run.resume_checkpoint)
    run.started(first)
    for step in range(first + 1, STEPS + 1):
        together = torch.tensor(step if run.is_main else 0)
        dist.all_reduce(together)
        weights = _step(weights, int(together)) if run.is_main else learned(weights, int(together))
        run.progress(step)
        stops = run.stop_requested
        if run.is_main and (step % SAVED_EVERY == 0 or stops):
            run.checkpoint_saved(_save(run.checkpoint_dir, weights, step), step)
        if stops:
            raise KeyboardInterrupt
    if run.is_main:
        Path(os.environ["WEIGHTS_FILE"]).write_text(str(weights))
    dist.destroy_process_group()
    return {"weights": str(weights)}


def built_in(cfg, run):
    """The built-in trainer."""
    from robust_train.folder.checkpoints import SUFFIX
    from robust_train.vision.trainer import train

    ready_step = 0

    def progress(step, **more):
        nonlocal ready_step
        # it saves in the background, and announces that at a later step
        if not ready_step and any(run.checkpoint_dir.glob(f"*{SUFFIX}")):
            ready_step = step
        if ready_step:
            _be_held(step, ready_step)
        return report(step, **more)

    report, run.progress = run.progress, progress
    return train(cfg, run)


def main() -> None:
    """Learn as a script: ``worst_day_trainers.py FOLDER [CHECKPOINT]``."""
    folder = Path(sys.argv[1])
    weights, first = _load(sys.argv[2] if len(sys.argv) > 2 else None)
    for step in range(first + 1, STEPS + 1):
        weights = _step(weights, step)
        if step % SAVED_EVERY == 0:
            _save(folder, weights, step)
    Path(os.environ["WEIGHTS_FILE"]).write_text(str(weights))


if __name__ == "__main__":
    main()
