"""A job of Lightning's manual optimization."""

import torch
from running_out import Fuse
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import conformance_trainers
from framework_config import QUIET


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

    trainer = lightning.Trainer(**trainer_arguments(cfg, run) | QUIET, max_epochs=2)
    samples = conformance_trainers.data(22)
    loader = DataLoader(TensorDataset(samples), cfg.training.batch_size, shuffle=True)
    model = Module()
    fit(trainer, model, loader, cfg=cfg, run=run)
    return [trainer.global_step, *(p.item() for p in model.parameters())]
