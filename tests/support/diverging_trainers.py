"""Trainings with a planted fault: a batch of NaN, an overflow, a learning rate too high, a
checkpoint that is damaged after it was written."""

import os
import signal
import sys
import time
from typing import Any

import torch

from robust_train.attempt.run import live_of
from robust_train.folder.checkpoint_writing import save_checkpoint
from robust_train.folder.checkpoints import mark
from robust_train.model.errors import TrainingDiverged

STEPS = 40
NAN, OVERFLOW = 17, 3e38


def batch_of(step: int, fault: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 4, generator=generator)
    y = x.sum(dim=1, keepdim=True)
    if step == NAN and fault in ("bad", "overflow"):
        x[3] = float("nan") if fault == "bad" else OVERFLOW
    return x, y


def train(cfg: Any, run: Any) -> list[float]:
    """A linear model; what it is to meet is in ``cfg.fault``, how it steps in ``cfg.how``."""
    torch.manual_seed(0)
    model, fault, how = torch.nn.Linear(4, 1), cfg.fault, cfg.how
    lr = 0.01 if how == "constant lr" else cfg.training.lr
    if fault == "lr":
        lr = lr**20  # so that half of it is far less
    kind = torch.optim.SGD if fault == "lr" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=lr, fused=how == "fused")
    state = {"model": model, "optimizer": optimizer}
    start = run.load(state)

    def loss_of(batch):
        x, y = batch
        return torch.nn.functional.mse_loss(model(x), y)

    for step in range(start + 1, STEPS + 1):
        # the data's fault is gone the second time, as where a record was read badly
        planted = fault if not (fault == "bad once" and run.attempt > 1) else ""
        batch = batch_of(step, "bad" if planted == "bad once" else planted)
        loss = run.backward(loss_of, batch, model)
        if fault == "left out" and step == NAN:
            optimizer.zero_grad()
        elif how in ("step", "fused"):
            run.step(optimizer)
        else:
            optimizer.step()
            optimizer.zero_grad()
        reported = {} if how == "silent" else {"loss": loss.item()}
        try:
            run.progress(step, total_steps=STEPS, **reported)
        except TrainingDiverged:
            if how == "recorded late":
                # another rank has recorded it, which has not met a bad loss yet
                mark(run.checkpoint_dir, live_of(run).saving.job, lambda manifest: "finite")
            raise
        if step % 5 == 0:
            path = run.checkpoint_dir / f"step-{step:03d}.pt"
            save_checkpoint({**state, "step": step}, path)
            is_damaged = fault == "damage" and step == 25 and run.attempt == 1
            if is_damaged:
                os.truncate(path, path.stat().st_size // 2)
            run.checkpoint_saved(path, step)
            if is_damaged:
                os.kill(os.getpid(), signal.SIGKILL)
    return [value.item() for parameter in model.parameters() for value in parameter.flatten()]


def script(argv):
    """Report a loss that is not finite where the learning rate on the command line is above 0.1."""
    import robust_train

    run = robust_train.current_run()
    for step in range(1, 6):
        run.progress(step, loss=float("nan") if float(argv[1]) > 0.1 and step > 2 else 1.0)
        live_of(run).reports.send_last_progress()
    if float(argv[1]) > 0.1:
        time.sleep(60)  # it is ended before
    run.result(float(argv[1]))


if __name__ == "__main__":
    script(sys.argv)
