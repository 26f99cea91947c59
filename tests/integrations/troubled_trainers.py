"""Trainers of jobs whose rank 1 is killed in the first attempt, and has too little memory in the
next; and of Lightning's manual optimization."""

from __future__ import annotations

import os
import signal

import ranks_of_frameworks
import running_out
import torch
import torch.distributed as dist
from running_out import Fuse
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from integration_trainers import after_step

SAMPLES = 24


def _troubled(cfg, run):
    """Kill rank 1 after a step; in the next attempt half a micro-batch fits from the second step
    on."""
    if run.rank != 1:
        return
    if run.resume_checkpoint is None:
        after_step(run, cfg.killed_after, lambda: os.kill(os.getpid(), signal.SIGKILL))
        return
    fuse = Fuse("backward", at=2, fits=cfg.training.batch_size // 2)

    def burn(module, given, found):
        is_last = isinstance(module, nn.Linear) and torch.is_grad_enabled()
        return fuse(found) if is_last else None

    nn.modules.module.register_module_forward_hook(burn)


def _of_framework(name, cfg, run):
    _troubled(cfg, run)
    line = getattr(ranks_of_frameworks, name)(cfg, run, SAMPLES)
    return [line.layer.weight.item(), line.layer.bias.item()]


def accelerate(cfg, run):
    return _of_framework("accelerate", cfg, run)


def lightning(cfg, run):
    return _of_framework("lightning", cfg, run)


def transformers(cfg, run):
    return _of_framework("transformers", cfg, run)


def manual(cfg, run):
    """Lightning's manual optimization. On the last rank half a micro-batch fits from the third
    pass on; if the module does not accumulate, in the first attempt alone."""
    import lightning

    from robust_train.integrations.lightning import fit, trainer_arguments

    is_limited = cfg.is_limited and (cfg.accumulates or run.resume_checkpoint is None)
    is_here = is_limited and run.rank == run.world_size - 1

    class Module(lightning.LightningModule):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            fuse = Fuse("forward", at=3, fits=2) if is_here else Fuse()
            self.layer = nn.Sequential(fuse, nn.Linear(1, 1))
            if cfg.accumulates:
                self.accumulate_grad_batches = 1

        def training_step(self, batch, batch_idx):
            every = getattr(self, "accumulate_grad_batches", 1)
            self.manual_backward((self.layer(batch[0]) - 1).square().mean() / every)
            if (batch_idx + 1) % every == 0 or self.trainer.is_last_batch:
                self.optimizers().step()
                self.optimizers().zero_grad()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.1)

    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    trainer = lightning.Trainer(
        **trainer_arguments(cfg, run) | dict.fromkeys(quiet, False), max_epochs=2
    )
    samples = ranks_of_frameworks.data(22)
    loader = DataLoader(TensorDataset(samples), cfg.training.batch_size, shuffle=True)
    model = Module()
    fit(trainer, model, loader, cfg=cfg, run=run)
    return [trainer.global_step, *(p.item() for p in model.parameters())]


def built_in(cfg, run):
    from robust_train.vision.trainer import train

    running_out.SAMPLE_BYTES = 16 << 20
    _troubled(cfg, run)
    return train(cfg, run)


def replicated(cfg, run):
    return _in_a_loop(cfg, run, nn.parallel.DistributedDataParallel)


def sharded(cfg, run):
    from torch.distributed.fsdp import fully_shard

    return _in_a_loop(cfg, run, fully_shard)


def _in_a_loop(cfg, run, wrapped):
    """Six steps with a loop of its own, and a checkpoint after the third."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    from robust_train.vision.sharding import whole

    _troubled(cfg, run)
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    start = 0
    if run.world_size > 1:
        dist.init_process_group("gloo")
        model = wrapped(net)
    else:
        model = net
    if run.resume_checkpoint is not None:
        start, weights = torch.load(run.resume_checkpoint)
        set_model_state_dict(net, weights, options=StateDictOptions(full_state_dict=True))
    run.started(start)
    for step in range(start + 1, 7):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 4, generator=generator)[run.rank :: run.world_size]
        run.backward(lambda part: (model(part) - 1).square().mean(), x, model)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        weights = whole(net.state_dict(), keeps=True)
        if step == 3 and run.is_main:
            run.checkpoint_dir.mkdir(parents=True, exist_ok=True)
            torch.save((step, weights), run.checkpoint_dir / "3.pt")
            run.checkpoint_saved(run.checkpoint_dir / "3.pt", step)
        run.progress(step)
    if run.world_size > 1:
        dist.destroy_process_group()
    return [*weights["weight"].flatten().tolist(), *weights["bias"].tolist()]
