"""The trainer of the golden journals: it fits a small model and meets what ``MEETS`` names."""

import math
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

STEPS = 12
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.50 GiB of "
    "which 1.20 GiB is free. Of the allocated memory 20.10 GiB is allocated by PyTorch, and "
    "1.50 GiB is reserved by PyTorch but unallocated."
)


def train(cfg, run):
    """Fit with the keys of our own configs."""
    return fit(cfg.training.batch_size, cfg.training.lr, run)


def fit(batch_size, lr, run):
    """Take twelve steps, save every fourth, and return the loss."""
    meets = os.environ["MEETS"]
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    first = 0
    if run.resume_checkpoint is not None:
        first, weights = torch.load(run.resume_checkpoint)
        model.load_state_dict(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    data = torch.randn(batch_size, 16)
    run.checkpoint_dir.mkdir(exist_ok=True)
    run.started(first)

    def loss_of(part):
        if meets == "oom_in_step" and len(part) > 16:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        loss = nn.functional.mse_loss(model(part), part.sum(1, keepdim=True))
        diverges = meets == "diverged" and step >= 6 and first == 0
        return loss * math.nan if diverges else loss

    for step in range(first + 1, STEPS + 1):
        optimizer.zero_grad()
        loss = run.backward(loss_of, data, model)
        optimizer.step()
        run.progress(step, total_steps=STEPS, loss=loss.item(), lr=lr)
        if step % 4 == 0 and run.is_main:
            path = run.checkpoint_dir / f"step-{step}"
            torch.save((step, model.state_dict()), path)
            run.checkpoint_saved(path, step)
            run.epoch_ended(step // 4, val_loss=loss.item() * 1.1)
        if _meet(meets, step, batch_size, run):
            return None
        time.sleep(0.12)  # longer than the pause between two reports
    run.record("fitted", {"loss": "low"})
    return {"objective": loss.item(), "steps": STEPS}


def _meet(meets, step, batch_size, run):
    """Meet what is due at a step; return whether the trainer was asked to stop."""
    if step != 6:
        return False
    is_first = run.resume_checkpoint is None
    runs_out = meets == "oom" and batch_size > 16
    if runs_out and run.rank == run.world_size - 1:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)
    if meets == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if meets == "bug":
        raise ValueError("<b>the labels</b> go from 0 to 12, and the model has ten outputs")
    if meets == "stall" and is_first:
        time.sleep(600)
    is_stopped = meets in ("stopped", "lost") and is_first
    if is_stopped or runs_out:  # a rank waits for the other one, as in a collective
        Path(os.environ["AT_STEP_6"]).touch()
        while not run.should_stop():
            time.sleep(0.02)
        return True
    return False
