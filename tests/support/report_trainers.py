"""Trainers whose runs are worth a report: they take steps, report them, and save them."""

from __future__ import annotations

import json
import os
import time

import torch
from torch import nn

STEPS = 60


def within_a_budget(cfg, run):
    """Fits a small model for real; on a GPU whose budget the batch exceeds, memory runs out."""
    budgets = json.loads(os.environ.get("BATCH_BUDGETS", "{}"))
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES") or "cpu"
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    first = 0
    if run.resume_checkpoint is not None:
        first, weights = torch.load(run.resume_checkpoint)
        model.load_state_dict(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.training.lr)
    data = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    target = data.sum(1, keepdim=True)
    run.checkpoint_dir.mkdir(exist_ok=True)
    run.started(first)
    run.record("retried", {"loss": "high"})
    for step in range(first + 1, STEPS + 1):
        loss = nn.functional.mse_loss(model(data), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.progress(step, total_steps=STEPS, loss=loss.item(), lr=cfg.training.lr)
        if step % 10 == 0:
            path = run.checkpoint_dir / f"step-{step}"
            torch.save((step, model.state_dict()), path)
            run.checkpoint_saved(path, step)
            run.epoch_ended(step // 10, val_loss=loss.item() * 1.1)
        if step == 25 + 2 * run.attempt and cfg.training.batch_size > budgets.get(gpu, 10**9):
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
                "23.50 GiB of which 1.20 GiB is free. Of the allocated memory 20.10 GiB is "
                "allocated by PyTorch, and 1.50 GiB is reserved by PyTorch but unallocated."
            )
        time.sleep(0.02)  # so that a report a tenth of a second is passed on for some steps
    return {"objective": loss.item(), "steps": STEPS}
