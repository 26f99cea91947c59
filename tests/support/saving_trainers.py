"""Trainers that save their own checkpoints, one a step."""

import os
import time
from pathlib import Path

from robust_train.model.errors import Interrupted
from trainers import saves


def counts(cfg, run):
    """Count to ``STEPS``, with a checkpoint after each step of which only the newest is kept."""
    first = 0 if run.resume_checkpoint is None else int(Path(run.resume_checkpoint).read_text())
    run.started(first)
    (run.run_dir / "pid").write_text(str(os.getpid()))
    for step in range(first + 1, int(os.environ["STEPS"]) + 1):
        run.progress(step)
        saves(run, f"step-{step:08d}.txt", step, str(step))
        run.saving.rotate("step-*.txt", 1)
        if run.stop_requested:
            raise Interrupted(f"stopped after step {step}")
        time.sleep(0.02)
    return {"first": first, "attempt": run.attempt}
