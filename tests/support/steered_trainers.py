"""Trainers that are talked to while they train, each with habits of its own.

torch is imported by those that use it, so that the others start sooner.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def _ready():
    Path(os.environ["READY_FILE"]).write_text(f"{os.getpid()}")


def _told_to_end():
    return Path(os.environ["GO_FILE"]).exists()


def _network(seed=0):
    import torch

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def never_uses_run(cfg):
    """Only torch."""
    import torch

    model, optimizer = _network()
    while not _told_to_end():
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        _ready()
        time.sleep(0.02)
    return "ended"


def reports_and_nothing_else(cfg, run):
    step = 0
    while not _told_to_end():
        step += 1
        run.progress(step, loss=1.0 / step)
        _ready()
        time.sleep(0.02)
    return step


def saves_when_it_stops(cfg, run):
    """As the README has it: a checkpoint at the end, and a plain return."""
    step, total = 0, 10_000
    if run.resume_checkpoint is not None:
        step = int(Path(run.resume_checkpoint).read_text())
    run.started(step)
    while step < total and not _told_to_end():
        step += 1
        run.progress(step, total_steps=total)
        _ready()
        if run.stop_requested:
            run.checkpoint_dir.mkdir(exist_ok=True)
            path = run.checkpoint_dir / "latest"
            path.write_text(str(step))
            run.checkpoint_saved(path, step)
            return "stopped"
        time.sleep(0.02)
    return {"batch_size": cfg.training.batch_size, "went_on_from": run.resume_checkpoint}


def hangs_after_a_step(cfg, run):
    run.started(0)
    run.progress(1, total_steps=10, loss=0.5)
    _ready()
    while not _told_to_end():
        time.sleep(0.02)
    return "ended"


def does_not_hear_a_stop(cfg, run):
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    return hangs_after_a_step(cfg, run)


def trains_in_parts(cfg, run):
    """Thirty steps in micro-batches; halts after the fifth until it is told to go on."""
    import torch

    model, optimizer = _network()
    generator = torch.Generator().manual_seed(1)
    sizes = []
    for step in range(1, 31):
        data = torch.randn(64, 8, generator=generator)
        optimizer.zero_grad()
        parts = []

        def loss_of(part, parts=parts):
            parts.append(len(part))
            return (model(part) - part.sum(1, keepdim=True)).square().mean()

        run.backward(loss_of, data, model)
        optimizer.step()
        sizes.append(max(parts))
        run.progress(step, total_steps=30)
        if step == 5:
            _ready()
        while step >= 5 and not _told_to_end():
            time.sleep(0.02)
            run.progress(step)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"sizes": sizes, "weights": weights.tolist()}
