"""A script that torchrun starts, with trouble that each test names in ``TROUBLE``."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from robust_train import TrainingStopped, launch
from robust_train.attempt.run import live_of

STEPS, SAMPLES = 12, 16
OOM = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free."


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(step)
    inputs, targets = (torch.randn(SAMPLES, n, generator=numbers).double() for n in (8, 2))
    return inputs, targets


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 2).double()


def undisturbed() -> list[float]:
    """Return the weights that every job here has to end with."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(1, STEPS + 1):
        inputs, targets = batch_of(step)
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


def train(cfg, run):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(new_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = {"model": model.module}
    first = run.load(state)
    share = SAMPLES // run.world_size
    mine = slice(run.rank * share, (run.rank + 1) * share)
    for step in range(first + 1, STEPS + 1):
        optimizer.zero_grad()
        inputs, targets = batch_of(step)
        run.backward(
            lambda part, step=step: loss_of(part, step, run, model),
            (inputs[mine], targets[mine]),
            model,
        )
        if is_due("runs_out", step, run, once=True):
            raise torch.OutOfMemoryError(OOM)
        if is_due("is_killed", step, run, once=True):
            os.kill(os.getpid(), signal.SIGKILL)
        if is_due("loses_agent", step, run, once=True):
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
        if is_due("has_a_bug", step, run):
            raise ValueError("a bug of mine")
        optimizer.step()
        run.progress(step, total_steps=STEPS)
        run.save(state, step)
        live_of(run).saves.finish()
        if is_due("waits", step, run):
            (run.run_dir / f"waits-{run.rank}").touch()
            while not run.should_stop():
                dist.barrier()
        if run.should_stop():
            raise TrainingStopped
    return nn.utils.parameters_to_vector(model.module.parameters()).tolist()


def loss_of(part, step: int, run, model: nn.Module) -> torch.Tensor:
    x, y = part
    if is_due("runs_out_in_step", step, run) and len(x) == SAMPLES // run.world_size:
        raise torch.OutOfMemoryError(OOM)
    return (model(x) - y).square().mean()


def is_due(trouble: str, step: int, run, *, once: bool = False) -> bool:
    """Return whether rank 1 has this trouble at this step; all ranks have those of ``waits``."""
    wanted = dict(setting.split("=") for setting in os.environ.get("TROUBLE", "").split())
    if wanted.get(trouble) != str(step) or (run.rank != 1 and trouble != "waits"):
        return False
    mark = Path(run.run_dir, trouble)
    if once and mark.exists():
        return False
    mark.touch()
    return True


if __name__ == "__main__":
    launch(
        train,
        {
            **({} if "AUTO_DEVICE" in os.environ else {"auto_device": False, "device": "cpu"}),
            "min_batch_size": 1,
            "training": {
                "effective_batch_size": SAMPLES,
                "batch_size": int(os.environ.get("BATCH_SIZE", SAMPLES // 2)),
            },
        },
        run_dir=sys.argv[1],
    )
