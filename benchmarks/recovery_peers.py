"""The contestants of ``recovery.py`` from other libraries, each used as its documentation shows,
and recovery in the steps of their trainers.

Where a choice was left, it is the one that serves the library better. The libraries are imported
inside the functions: each child process of the benchmark has one of them at most.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from recovery_contestants import Contestant, Ending
from recovery_job import METER, SEED, Job, Network, Samples, build, collate, loader
from torch.utils.data import DataLoader


def accelerate_documented(job: Job, folder: Path) -> Ending:
    """``find_executable_batch_size`` with its own steps down, which are of a tenth."""
    return _accelerate(job, None)


def accelerate_halving(job: Job, folder: Path) -> Ending:
    """The same, halving the batch, so that accumulation can make up for it exactly."""
    size = job.batch

    def half() -> int:
        nonlocal size
        size //= 2
        return size

    return _accelerate(job, half)


def _accelerate(job: Job, reduce_batch_size: Callable[[], int] | None) -> Ending:
    """After accelerate's example ``by_feature/automatic_gradient_accumulation.py``.

    The inner function is called anew for each size, so training starts from scratch.
    """
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size, set_seed

    accelerator = Accelerator(cpu=True)

    @find_executable_batch_size(
        starting_batch_size=job.batch, reduce_batch_size_fn=reduce_batch_size
    )
    def inner_training_loop(batch_size: int) -> Network:
        # a batch that does not divide the requested one rounds down, to 1 for more than half of it
        accelerator.gradient_accumulation_steps = job.batch // batch_size
        accelerator.free_memory()
        set_seed(SEED)
        network, optimizer = build(job)
        network, optimizer, batches = accelerator.prepare(
            network, optimizer, loader(job, batch_size)
        )
        for batch in batches:
            with accelerator.accumulate(network):
                accelerator.backward(network(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
        return network

    return Ending(inner_training_loop().state_dict())


def accelerate_plain(job: Job, folder: Path) -> Ending:
    """accelerate's own loop, with memory for the whole batch."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    network, optimizer = build(job)
    network, optimizer, batches = accelerator.prepare(network, optimizer, loader(job, job.batch))
    for batch in batches:
        accelerator.backward(network(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    return Ending(network.state_dict())


def accelerate_in_step(job: Job, folder: Path) -> Ending:
    """``RobustLoop`` in place of the loop."""
    from accelerate import Accelerator

    from robust_train.integrations.accelerate import RobustLoop

    accelerator = Accelerator(cpu=True)
    network, optimizer = build(job)
    network, optimizer, batches = accelerator.prepare(network, optimizer, loader(job, job.batch))
    cfg, run = _attempt(job, folder)
    loop = RobustLoop(accelerator, network, batches, cfg=cfg, run=run)
    for _ in loop.epochs(1):
        for batch in loop.batches():
            loop.backward(lambda part: network(**part)["loss"], batch)
            optimizer.step()
            optimizer.zero_grad()
    return Ending(network.state_dict())


def lightning(job: Job, folder: Path) -> Ending:
    """``Tuner.scale_batch_size``, then ``fit``.

    The finder looks for the largest batch that fits, from 2 upwards and beyond the requested one,
    by three steps of the data's beginning at each size; then weights are as before. What becomes
    too large later ends the fit. The documentation leaves accumulation to the user; here it makes
    up for a smaller batch.
    """
    from lightning.pytorch.tuner import Tuner

    module, trainer = _lightning(job, folder)
    found = Tuner(trainer).scale_batch_size(module, mode="power")
    assert found is not None
    module.batch_size = min(found, job.batch)
    trainer.accumulate_grad_batches = job.batch // module.batch_size
    # the trials' steps were thrown away; they count as begun
    METER.step_samples.clear()
    trainer.fit(module)
    return Ending(module.network.state_dict())


def lightning_plain(job: Job, folder: Path) -> Ending:
    """``trainer.fit``, with memory for the whole batch."""
    module, trainer = _lightning(job, folder)
    trainer.fit(module)
    return Ending(module.network.state_dict())


def lightning_in_step(job: Job, folder: Path) -> Ending:
    """``robust_train.integrations.lightning.fit`` in place of ``trainer.fit``."""
    from robust_train.integrations.lightning import fit

    module, trainer = _lightning(job, folder)
    cfg, run = _attempt(job, folder)
    fit(trainer, module, module.train_dataloader(), cfg=cfg, run=run)
    return Ending(module.network.state_dict())


def _lightning(job: Job, folder: Path) -> tuple[Any, Any]:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self._optimizer = build(job)
            self.batch_size = job.batch
            # The finder asks for a new loader inside of its handler, where the failed pass still
            # holds all memory: there is no room for the data once more.
            self._samples = Samples(job)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.network(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return self._optimizer

        def train_dataloader(self) -> Any:
            return DataLoader(self._samples, batch_size=self.batch_size, collate_fn=collate)

    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    return Module(), trainer


def _attempt(job: Job, folder: Path) -> tuple[Any, Any]:
    """Return the config and the run of an attempt that saves at its end alone."""
    from omegaconf import OmegaConf

    from robust_train.attempt.run import Run, live_of
    from robust_train.config.checks import unchecked
    from robust_train.config.training_plans import MicroBatchPlan

    training = {
        "batch_size": job.batch,
        "gradient_accumulation_steps": 1,
        "num_workers": 0,
        "prefetch_factor": 2,
        "checkpoint_every_minutes": 60,
        "checkpoint_every_steps": None,
        "keep_checkpoints": 2,
        "log_every_steps": job.steps,
    }
    cfg = OmegaConf.create(
        {"device": "cpu", "min_batch_size": 1, "seed": SEED, "training": training}
    )
    run = Run(run_dir=folder)
    live_of(run).parts.split_by(MicroBatchPlan.of(unchecked(cfg)))
    return cfg, run


def transformers(job: Job, folder: Path) -> Ending:
    """``Trainer`` with ``auto_find_batch_size=True``.

    It starts its loop again at nine tenths of the batch, from the first sample but with the weights
    that it has by then, and leaves the accumulation as it was asked for.
    """
    return _transformers(job, folder, finds_batch_size=True)


def transformers_plain(job: Job, folder: Path) -> Ending:
    """``trainer.train``, with memory for the whole batch."""
    return _transformers(job, folder, finds_batch_size=False)


def _transformers(job: Job, folder: Path, *, finds_batch_size: bool) -> Ending:
    trainer = _trainer(
        job,
        {
            "output_dir": str(folder),
            "auto_find_batch_size": finds_batch_size,
            "per_device_train_batch_size": job.batch,
            "use_cpu": True,
            "seed": SEED,
        },
    )
    trainer.train()
    return Ending(trainer.model.state_dict())


def transformers_in_step(job: Job, folder: Path) -> Ending:
    """``robust_train.integrations.transformers.fit`` in place of ``trainer.train``."""
    from robust_train.integrations.transformers import fit, training_arguments

    cfg, run = _attempt(job, folder)
    trainer = _trainer(job, training_arguments(cfg, run))
    fit(trainer, cfg=cfg, run=run)
    return Ending(trainer.model.state_dict())


def _trainer(job: Job, arguments: dict[str, Any]) -> Any:
    from transformers import Trainer, TrainingArguments

    network, optimizer = build(job)
    return Trainer(
        model=network,
        args=TrainingArguments(
            **arguments,
            num_train_epochs=1,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Samples(job),
        data_collator=collate,
        optimizers=(optimizer, None),
    )


PEERS = {
    "accelerate": Contestant(
        "accelerate `find_executable_batch_size`", accelerate_documented, ("accelerate",)
    ),
    "accelerate_halving": Contestant("the same, halving", accelerate_halving, ("accelerate",)),
    "accelerate_in_step": Contestant(
        "**robust-train, in accelerate's step**",
        accelerate_in_step,
        ("accelerate", "robust_train.integrations.accelerate"),
    ),
    "lightning": Contestant(
        "Lightning `scale_batch_size`, then `fit`",
        lightning,
        ("lightning.pytorch", "lightning.pytorch.tuner"),
    ),
    "lightning_in_step": Contestant(
        "**robust-train, in Lightning's step**",
        lightning_in_step,
        ("lightning.pytorch", "robust_train.integrations.lightning"),
    ),
    "transformers": Contestant(
        "transformers `auto_find_batch_size`", transformers, ("transformers.trainer", "accelerate")
    ),
    "transformers_in_step": Contestant(
        "**robust-train, in transformers' step**",
        transformers_in_step,
        ("transformers.trainer", "accelerate", "robust_train.integrations.transformers"),
    ),
}
