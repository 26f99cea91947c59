"""Trainers that are talked to while they train, each with habits of its own.

torch is imported by those that use it, so that the others start sooner.
"""

import os
import signal
import time
from pathlib import Path

from robust_train.model.errors import Interrupted
from trainers import is_ready, may_go, saves


def _network(seed=0):
    import torch

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def never_uses_run(cfg):
    """Only torch."""
    import torch

    model, optimizer = _network()
    while not may_go():
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        is_ready()
        time.sleep(0.02)
    return "ended"


def reports_and_nothing_else(cfg, run):
    step = 0
    while not may_go():
        step += 1
        run.progress(step, loss=1.0 / step)
        is_ready()
        time.sleep(0.02)
    return step


def saves_when_it_stops(cfg, run):
    """As the README has it: a checkpoint at the end, and a plain return."""
    step, total = 0, 10_000
    if run.resume_checkpoint is not None:
        step = int(Path(run.resume_checkpoint).read_text())
    run.started(step)
    while step < total and not may_go():
        step += 1
        run.progress(step, total_steps=total)
        is_ready()
        if run.stop_requested:
            saves(run, "latest", step, str(step))
            return "stopped"
        time.sleep(0.02)
    return {"batch_size": cfg.training.batch_size, "went_on_from": run.resume_checkpoint}


def hangs_after_a_step(cfg, run):
    run.started(0)
    run.progress(1, total_steps=10, loss=0.5)
    is_ready()
    while not may_go():
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
            is_ready()
        while step >= 5 and not may_go():
            time.sleep(0.02)
            run.progress(step)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"sizes": sizes, "weights": weights.tolist()}


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
