"""Two processes that train together by a framework's own trainer: prints what each has seen.

Run as a script with the framework's name and a folder; the processes are forks of one interpreter.
"""

import contextlib
import functools
import json
import operator
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import test_lightning_in_step as of_lightning
import test_transformers_in_step as of_transformers
import torch
import torch.distributed as dist
from running_out import Fuse

from forked_ranks import of_ranks
from framework_config import QUIET, SILENT
from robust_train.attempt.run import live_of
from robust_train.config.training_plans import MicroBatchPlan
from watched_run import WatchedRun

KINDS = {
    "plain": None,
    # the micro-batches of the second step
    "first forward": ("forward", 3),
    "first backward": ("backward", 3),
    "second forward": ("forward", 4),
    "second backward": ("backward", 4),
    "evaluation": ("forward", 1),
    "exhausted": ("forward", 4),
    # they leave the other rank in the middle of a pass
    "collective": ("backward", 3),
    "manual": ("forward", 3),
}


class Collective(torch.nn.Module):
    """Averages something over the ranks in each pass, as losses for a log often are."""

    def forward(self, x):
        if self.training:
            dist.all_reduce(x.detach().mean())
        return x


def trained(framework, kind, rank, folder):
    """Train three steps of two batches; on rank 1 memory runs out as ``kind`` says."""
    where = KINDS[kind]
    fits = 0 if kind == "exhausted" else 2
    training = kind != "evaluation"
    fuse = Fuse(*where, fits=fits, training=training) if where and rank == 1 else Fuse()
    layer = torch.nn.Sequential(fuse, Collective()) if kind == "collective" else fuse
    run = WatchedRun(folder)
    live_of(run).parts.split_by(MicroBatchPlan(4, 2))
    train = _lightning if framework == "lightning" else _transformers
    seen: dict[str, Any] = {}
    try:
        model, seen["logged"] = train(layer, run, folder, kind)
        seen["weights"] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    except (RuntimeError, MemoryError) as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    changed = [e for e in run.of("micro_batch_changed") if e["training"]]
    return {
        **seen,
        "sizes": fuse.sizes,
        "changed": [(e["step"], e["before"], e["after"]) for e in changed],
        "size": run.micro_batcher.size,
    }


def _transformers(layer, run, folder, kind):
    import transformers

    from robust_train.integrations.transformers_step import recover_in_steps

    model = of_transformers.Tagger(layer, sums=False)
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        learning_rate=0.05,
        logging_steps=1,
        **SILENT,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=of_transformers.samples(48))
    if kind != "plain":
        recover_in_steps(trainer, run)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return model, [*losses, trainer.evaluate(of_transformers.samples(12))["eval_loss"]]


class Logs(of_lightning.Net):
    def training_step(self, batch, batch_idx):
        loss = self._loss(batch).mean()
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.outputs.append(float(self.trainer.callback_metrics["train_step"]))

    def validation_step(self, batch, batch_idx):
        self.log("val", self._loss(batch).mean(), sync_dist=True)


def _lightning(layer, run, folder, kind):
    import lightning

    from robust_train.integrations.lightning_step import recover_in_steps
    from robust_train.integrations.sample_order import StepShares

    model = of_lightning._Manual(layer) if kind == "manual" else Logs(layer)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        default_root_dir=str(folder),
        max_epochs=1,
        accumulate_grad_batches=1 if kind == "manual" else 2,
        gradient_clip_val=None if kind == "manual" else 0.5,
        **QUIET,
    )
    if kind != "plain":
        recover_in_steps(trainer, model, run, SimpleNamespace(done=0, shares=StepShares(4)))
    trainer.fit(model, of_lightning.loader(48))
    epoch = float(trainer.callback_metrics["train_epoch"])
    (validated,) = trainer.validate(model, of_lightning.loader(12), verbose=False)
    # a value over the ranks is that of the step's last batch
    return model, [*model.outputs[1::2], epoch, validated["val"]]


def main():
    framework, folder = sys.argv[1], Path(sys.argv[2])
    *kinds, last, manual = KINDS

    def trained_by_two(*kinds):
        def be_rank(rank):
            with contextlib.redirect_stdout(sys.stderr):
                return {kind: trained(framework, kind, rank, folder) for kind in kinds}

        return of_ranks(2, be_rank)

    seen = [trained_by_two(*kinds), trained_by_two(last)]
    if framework == "lightning":
        seen.append(trained_by_two(manual))
    print(json.dumps([functools.reduce(operator.or_, rank) for rank in zip(*seen, strict=True)]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
