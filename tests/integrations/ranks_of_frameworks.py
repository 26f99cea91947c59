"""A framework's trainer with steps of eight samples, split in several ways: prints what was seen.

Run as a script with the framework's name and a folder; the ranks are forks of one interpreter.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, TensorDataset

from forked_ranks import of_forks, of_ranks
from robust_train.attempt.run import MicroBatchPlan, Run
from robust_train.config.checks import unchecked
from robust_train.host.votes import Votes

EPOCHS = 2
SPLITS = {
    # micro-batch, accumulation, ranks, samples in an epoch
    "alone": (8, 1, 1, 21),
    "in parts": (2, 4, 1, 21),
    "two ranks": (4, 1, 2, 21),
    "two ranks in parts": (2, 2, 2, 21),
    "four ranks": (1, 2, 4, 21),
    "one sample left": (8, 1, 1, 17),
    "one sample left for two ranks": (2, 2, 2, 17),
}
RESUMED = {"two ranks in parts, then four": (1, 2, 4, 21), "and one": (8, 1, 1, 21)}


def data(samples: int) -> torch.Tensor:
    return torch.arange(1.0, samples + 1)[:, None] / samples


class Line(torch.nn.Module):
    """Writes down what it is trained on."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)
        self.run = run
        self.seen: list[tuple[int, float]] = []

    def forward(self, x, labels=None, num_items_in_batch=None, **others):
        if self.training:
            step = self.run.last_step
            if step is None:
                step = self.run.steps_before
            self.seen += [(step, value) for value in x.flatten().tolist()]
        errors = (self.layer(x) - 1) ** 2
        if labels is None:
            return errors.mean()
        return {"loss": errors.sum() / (num_items_in_batch or len(x))}


def accelerate(cfg, run: Run, samples: int) -> Line:
    from accelerate import Accelerator

    from robust_train.integrations.accelerate import RobustLoop, effective_batch_size

    accelerator = Accelerator(cpu=True)
    line = Line(run)
    model, optimizer, loader = accelerator.prepare(
        line,
        torch.optim.SGD(line.parameters(), lr=0.1),
        DataLoader(TensorDataset(data(samples)), effective_batch_size(cfg), shuffle=True),
    )
    loop = RobustLoop(accelerator, model, loader, cfg=cfg, run=run)
    for _ in loop.epochs(EPOCHS):
        for batch in loop.batches():
            loop.backward(lambda part: model(part[0]), batch)
            optimizer.step()
            optimizer.zero_grad()
    return line


def lightning(cfg, run: Run, samples: int) -> Line:
    import lightning as lightning_

    from robust_train.integrations.lightning import fit, trainer_arguments

    class Module(lightning_.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.line = Line(run)

        def training_step(self, batch):
            return self.line(batch[0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    trainer = lightning_.Trainer(
        **trainer_arguments(cfg, run),
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    loader = DataLoader(TensorDataset(data(samples)), cfg.training.batch_size, shuffle=True)
    fit(trainer, module, loader, cfg=cfg, run=run)
    return module.line


def transformers(cfg, run: Run, samples: int) -> Line:
    from transformers import Trainer, TrainingArguments

    from robust_train.integrations.transformers import fit, training_arguments

    line = Line(run)
    arguments = TrainingArguments(
        **training_arguments(cfg, run),
        num_train_epochs=EPOCHS,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0,
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
    )
    rows = [{"x": x.tolist(), "labels": [1.0]} for x in data(samples)]
    fit(Trainer(line, arguments, train_dataset=rows), cfg=cfg, run=run)
    return line


def attempt(which: str, folder: Path, how: tuple[int, ...], resume: Path | None = None):
    """What each rank has seen, the weights at its end, and the checkpoints."""
    micro_batch, accumulation, ranks, samples = how
    cfg = OmegaConf.create(
        {
            "device": "cpu",
            "num_gpus": ranks,
            "training": {
                "batch_size": micro_batch,
                "gradient_accumulation_steps": accumulation,
                "num_workers": 0,
                "prefetch_factor": 2,
                "seed": 3,
                "checkpoint_every_minutes": 60,
                "checkpoint_every_steps": 1,
                "keep_checkpoints": 20,
                "log_every_steps": 1,
            },
        }
    )
    votes = Votes(ranks) if ranks > 1 else None

    def work(rank: int) -> dict[str, Any]:
        events: list[dict[str, Any]] = []
        run = Run(
            run_dir=folder,
            resume_checkpoint=resume,
            report=lambda event: events.append(event.as_json()),
            rank=rank,
            world_size=ranks,
            flags=votes,
        )
        run.micro_batch_plan = MicroBatchPlan.of(unchecked(cfg))
        line = globals()[which](cfg, run, samples)
        return {
            "seen": line.seen,
            "weights": [line.layer.weight.item(), line.layer.bias.item()],
            "saved": {e["step"]: e["path"] for e in events if e["event"] == "checkpoint"},
        }

    return of_ranks(ranks, work) if ranks > 1 else of_forks(1, work)


def main() -> None:
    which, folder = sys.argv[1], Path(sys.argv[2])
    warnings.filterwarnings("ignore")
    for name in ("torch._dynamo", f"robust_train.integrations.{which}"):
        importlib.import_module(name)  # or every fork would
    for name in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    told = {name: attempt(which, folder / name, how) for name, how in SPLITS.items()}
    saved = told["two ranks in parts"][0]["saved"]
    for name, how in RESUMED.items():
        # the ranks see a request for a checkpoint up to two steps later
        told[name] = attempt(which, folder / name, how, Path(saved[min(saved)]))
    print("\n" + json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    main()
