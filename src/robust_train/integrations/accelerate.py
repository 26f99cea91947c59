"""Adds recovery and checkpoints to a training loop that uses accelerate: `RobustLoop`.

A trainer function creates the loop in the attempt's process, on every rank, and iterates over its
epochs and batches. ``docs/accelerate.md`` has an example.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig

from robust_train.attempt.last_save import save_last_again
from robust_train.attempt.run import Run, live_of
from robust_train.compat import schedulers_of
from robust_train.integrations.sample_order import StepShares, take_over
from robust_train.integrations.steering import (
    Steps,
    effective_batch_size,
    framework,
    refuse_saving_on_each_node,
)
from robust_train.model.errors import TrainingStopped, UserError
from robust_train.step.ranks import is_sharded, of_all_ranks
from robust_train.step.splitting import part_of

_loaders = framework("accelerate.data_loader")

__all__ = ["RobustLoop", "effective_batch_size"]

_PREFIX = "step-"  # of a checkpoint's folder, before the step

T = TypeVar("T")


class RobustLoop:
    """Yields the epochs and batches that a job still has to train.

    Each batch is one optimizer step. If memory runs out in a step, only that step is repeated, in
    smaller parts. If the smallest parts do not fit either, the next attempt resumes from the last
    checkpoint. A checkpoint has everything that ``Accelerator.save_state`` saves, and the position
    in the data.

    Args:
        accelerator: an ``Accelerator`` without gradient accumulation.
        model: the prepared model.
        loader: the prepared loader of training samples, in batches of `effective_batch_size`.
        cfg, run: the arguments of the trainer function.

    Attributes:
        epoch: the current epoch, counted from 0.
        samples: the samples of this epoch that are done, on all ranks together.
        step: the number of optimizer steps done.

    Raises:
        UserError: the effective batch cannot be kept. The message has the reason.
    """

    def __init__(
        self, accelerator: Any, model: Any, loader: Any, *, cfg: DictConfig, run: Run
    ) -> None:
        _check(accelerator, run)
        refuse_saving_on_each_node("Accelerator", accelerator.project_configuration)
        log_of_accelerate = logging.getLogger("accelerate")
        if log_of_accelerate.level == logging.NOTSET:
            # accelerate logs twelve lines for each checkpoint. robust-train logs one line.
            log_of_accelerate.setLevel(logging.WARNING)
        self.accelerator = accelerator
        self.model = model
        self.run = run
        self.epoch = 0
        self.samples = 0
        self.step = 0
        self._loader = loader
        self._effective = effective_batch_size(cfg)
        self._order = take_over(
            loader, name="loader", shares=StepShares(self._effective), seed=cfg.seed
        )
        if run.world_size > 1:
            _divide_batches(loader)
        self._has_samples = True  # whether this rank has samples in the current step
        self._cfg = cfg.training
        self._steps = Steps(cfg, run)
        self._saved_step: int | None = None
        self._total_steps: int | None = None
        self._loss: Any = None  # of the current step
        live_of(run).saves.pass_over_skipped()
        accelerator.register_for_checkpointing(self)
        if run.should_stop():
            raise TrainingStopped("stopped before the first step")

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the remaining epochs, counted from 0.

        The first epoch that is yielded may have been started by an earlier attempt.
        """
        if self.run.resume_checkpoint is not None:
            self._load(self.run.resume_checkpoint)
        if self.run.world_size > 1:
            # A batch of all ranks is one optimizer step. Without this setting, accelerate would
            # step the scheduler once for each rank.
            for scheduler in schedulers_of(self.accelerator):
                scheduler.split_batches = True
        steps_of_epoch = -(-self._order.samples // self._effective)
        self._total_steps = count * steps_of_epoch
        self.run.started(self.step)
        live_of(self.run).reports.record_memory("training begins")
        while self.epoch < count:
            yield self.epoch
            self.epoch = self.epoch + 1
            self.samples = 0
            if self.epoch < count and self._saved_step is None:
                self.save()
        live_of(self.run).saves.finish()
        save_last_again(live_of(self.run), self.save)

    def _load(self, path: Path) -> None:
        """Load a checkpoint, and skip the samples on which training diverged after it."""
        if self.accelerator.num_processes == 1 and any(path.glob("pytorch_model_fsdp*")):
            raise UserError(
                f"{path}: has the shards of several ranks, which accelerate cannot read in one "
                "process; continue with num_gpus=2 or more"
            )
        self.accelerator.load_state(str(path))
        skipped_steps = max(live_of(self.run).saves.skips_to - self.step, 0)
        samples = self.samples + skipped_steps * self._effective
        self.samples = min(samples, self._order.samples)

    def batches(self) -> Iterator[Any]:
        """Yield the remaining batches of the current epoch. Taking the next batch ends the step.

        Raises:
            TrainingStopped: a stop was requested, and a checkpoint was saved.
        """
        self._order.begin(self.epoch, self.samples)
        if self.samples >= self._order.samples:
            return
        for batch in live_of(self.run).speed.measure_waits(self._batches_of_rank()):
            yield batch
            self.samples = min(self.samples + self._effective, self._order.samples)
            self.step += 1
            self._finish_step()

    def _batches_of_rank(self) -> Iterator[Any]:
        """Yield this rank's share of each step.

        An epoch's last step may have too few samples for this rank. It then gets an empty batch,
        because every rank must take part in the step's collectives.
        """
        steps_left = -(-(self._order.samples - self.samples) // self._effective)
        for batch in self._loader:
            yield batch
            steps_left -= 1
        if steps_left:
            loader = self._loader
            first = self._order.first()
            batch = loader.collate_fn([loader.dataset[first]])
            batch = _loaders.send_to_device(batch, self.accelerator.device)
            # A sharded model needs at least one sample for a pass. The loss of that sample gets
            # no weight (see `backward`).
            if not is_sharded(self.model):
                batch = part_of(batch, 0, 0)
            self._has_samples = False
            yield batch
            self._has_samples = True

    def _finish_step(self) -> None:
        """Report the step, save a checkpoint if one is due, and stop if requested."""
        self._steps.report(self.step, self._total_steps, self._loss)
        self._loss = None
        if self.run.should_stop():
            self.save()
            live_of(self.run).saves.finish()
            raise TrainingStopped(f"stopped after step {self.step}")
        if self.run.should_save():
            self.save()

    def backward(self, loss_of: Callable[[Any], Any], batch: Any, **options: Any) -> Any:
        """Call ``run.backward`` for this loop's model, with the accelerator's backward pass."""
        if not self._has_samples:
            options["length"] = _count_no_samples
        options.setdefault("backward", self.accelerator.backward)
        result = self.run.backward(loss_of, batch, self.model, **options)
        self._loss = result[0] if isinstance(result, tuple) else result
        return result

    def forward(self, function: Callable[[Any], T], batch: Any, **options: Any) -> list[T]:
        """Call ``run.forward`` for this loop's model."""
        return self.run.forward(function, batch, self.model, **options)

    def save(self) -> None:
        """Save a checkpoint while training continues, as ``run.save`` does."""
        saves = live_of(self.run).saves
        path = self.run.checkpoint_dir / f"{_PREFIX}{self.step:08d}"
        unfinished = path.with_name(f".{path.name}.tmp")
        saves.finish()
        is_saved = path.exists() and self._saved_step == self.step
        if self.run.is_main and not is_saved:
            # An attempt that was killed while it saved leaves files, perhaps of this very step.
            for leftover in path.parent.glob(f".{_PREFIX}*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
            shutil.rmtree(path, ignore_errors=True)
        is_saved_on_first_rank = of_all_ranks(is_saved)[0]
        if is_saved_on_first_rank:
            return
        self._saved_step = self.step

        def write_files() -> None:
            self.accelerator.save_state(str(unfinished))

        def publish() -> Path:
            return unfinished.rename(path)

        def save_files() -> None:
            folder = saves.folder(self._cfg.keep_checkpoints)
            folder.save_files(unfinished, self.step, write=write_files, publish=publish)

        saves.try_to_write(save_files)

    def state_dict(self) -> dict[str, object]:
        """Return this loop's part of a checkpoint. ``Accelerator.save_state`` calls it."""
        return {
            "epoch": self.epoch,
            "samples": self.samples,
            "step": self.step,
            "micro_batch": self.run.micro_batcher.state(),
        }

    def load_state_dict(self, state: Any) -> None:
        """Restore the position from a checkpoint. ``Accelerator.load_state`` calls it."""
        self.epoch = state["epoch"]
        self.samples = state["samples"]
        self.step = state["step"]
        self._saved_step = self.step
        self.run.micro_batcher.restore(state["micro_batch"])


def _count_no_samples(batch: Any) -> int:
    """Return 0, the length of a batch whose loss gets no weight."""
    return 0


def _divide_batches(loader: Any) -> None:
    """Set accelerate to divide each batch of a prepared loader among the ranks."""
    shard = getattr(loader, "batch_sampler", None)
    if not isinstance(shard, _loaders.BatchSamplerShard):
        raise UserError(
            "loader: is not divided among the ranks; pass it to accelerator.prepare, without "
            "dispatch_batches"
        )
    shard.split_batches = True
    shard.even_batches = False


def _check(accelerator: Any, run: Run) -> None:
    """Raise UserError if the accelerator would change the effective batch or hide checkpoints."""
    if accelerator.num_processes != run.world_size:
        raise UserError(
            f"Accelerator: has {accelerator.num_processes} processes, but this attempt has "
            f"{run.world_size}: start it with train_robust.py num_gpus=…, not with accelerate "
            "launch"
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise UserError(
            "Accelerator: accumulates gradients itself, which would divide them a second time; "
            "leave gradient_accumulation_steps out and set training.gradient_accumulation_steps"
        )
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise UserError(
            "Accelerator: automatic_checkpoint_naming hides checkpoints from later attempts; leave "
            "it out"
        )
