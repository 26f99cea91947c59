"""Your loop with accelerate under the launcher (`RobustLoop`). ``docs/accelerate.md`` has an
example."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
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

_SAVED = "step-"

T = TypeVar("T")


class RobustLoop:
    """The epochs and batches of a job, over all of its attempts.

    A batch is an optimizer step. If memory runs out in it, only that step is repeated, in smaller
    parts. If that is not enough, the next attempt resumes from the last checkpoint, which holds
    everything that ``Accelerator.save_state`` saves, and the position in the data.

    Args:
        accelerator: has the attempt's processes and no accumulation of its own.
        model: the prepared model.
        loader: training samples in batches of `effective_batch_size`.
        cfg: the trainer function's config.
        run: its run.

    Raises:
        UserError: the effective batch cannot be kept. The message has the reason.
    """

    def __init__(
        self, accelerator: Any, model: Any, loader: Any, *, cfg: DictConfig, run: Run
    ) -> None:
        _check(accelerator, run)
        refuse_saving_on_each_node("Accelerator", accelerator.project_configuration)
        its_log = logging.getLogger("accelerate")
        if its_log.level == logging.NOTSET:
            # accelerate logs twelve lines for each checkpoint, robust-train one.
            its_log.setLevel(logging.WARNING)
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
            _divide(loader)
        self._has_samples = True
        self._cfg = cfg.training
        self._steps = Steps(cfg, run)
        self._saved_step: int | None = None
        live_of(run).saves.pass_over_skipped()
        self._total: int | None = None
        self._loss: Any = None  # the last step's loss
        accelerator.register_for_checkpointing(self)
        if run.should_stop():
            raise TrainingStopped("stopped before the first step")

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the remaining epochs, counted from 0. An earlier attempt may have started the
        first."""
        path = self.run.resume_checkpoint
        if path is not None:
            if self.accelerator.num_processes == 1 and any(path.glob("pytorch_model_fsdp*")):
                raise UserError(
                    f"{path}: has the shards of several ranks, which accelerate cannot read in one "
                    "process; continue with num_gpus=2 or more"
                )
            self.accelerator.load_state(str(path))
            # data of this epoch with which training diverged is passed over
            passes_over = max(live_of(self.run).saves.skips_to - self.step, 0) * self._effective
            self.samples = min(self.samples + passes_over, self._order.samples)
        if self.run.world_size > 1:
            # A batch is a step, so accelerate must not step the scheduler once for each rank.
            for scheduler in schedulers_of(self.accelerator):
                scheduler.split_batches = True
        self._total = count * -(-self._order.samples // self._effective)
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

    def batches(self) -> Iterator[Any]:
        """Yield the remaining batches of the current epoch. Taking the next batch ends the step.

        Raises:
            TrainingStopped: a stop was requested, and a checkpoint was saved.
        """
        self._order.begin(self.epoch, self.samples)
        if self.samples >= self._order.samples:
            return
        for batch in live_of(self.run).speed.measure_waits(self._own_batches()):
            yield batch
            self.samples = min(self.samples + self._effective, self._order.samples)
            self.step += 1
            self._step_done()

    def _own_batches(self) -> Iterator[Any]:
        """Yield this rank's share of each step, which may be empty in an epoch's last step."""
        left = -(-(self._order.samples - self.samples) // self._effective)
        for batch in self._loader:
            yield batch
            left -= 1
        if left:
            loader = self._loader
            first = self._order.first()
            batch = loader.collate_fn([loader.dataset[first]])
            batch = _loaders.send_to_device(batch, self.accelerator.device)
            self._has_samples = False
            # A sharded model's pass needs at least one sample. Its loss gets no weight.
            is_whole = is_sharded(self.model)
            yield batch if is_whole else part_of(batch, 0, 0)
            self._has_samples = True

    def backward(self, loss_of: Callable[[Any], Any], batch: Any, **options: Any) -> Any:
        """Call ``run.backward`` for this loop's model, with the accelerator's backward pass."""
        if not self._has_samples:
            options["length"] = lambda batch: 0
        options.setdefault("backward", self.accelerator.backward)
        result = self.run.backward(loss_of, batch, self.model, **options)
        self._loss = result[0] if isinstance(result, tuple) else result
        return result

    def forward(self, function: Callable[[Any], T], batch: Any, **options: Any) -> list[T]:
        """Call ``run.forward`` for this loop's model."""
        return self.run.forward(function, batch, self.model, **options)

    def save(self) -> None:
        """Save a checkpoint while training continues, as ``run.save`` does."""
        path = self.run.checkpoint_dir / f"{_SAVED}{self.step:08d}"
        unfinished = path.with_name(f".{path.name}.tmp")
        live_of(self.run).saves.finish()
        is_there = path.exists() and self._saved_step == self.step
        if self.run.is_main and not is_there:
            # Attempts that were killed while they saved leave files, perhaps of this step.
            for leftover in path.parent.glob(f".{_SAVED}*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
            shutil.rmtree(path, ignore_errors=True)
        if of_all_ranks(is_there)[0]:
            return
        self._saved_step = self.step
        saves = live_of(self.run).saves

        def write() -> None:
            saves.folder(self._cfg.keep_checkpoints).save_files(
                unfinished,
                self.step,
                write=lambda: self.accelerator.save_state(str(unfinished)),
                publish=lambda: unfinished.rename(path),
            )

        saves.try_to_write(write)

    def state_dict(self) -> dict[str, object]:
        """Return what ``Accelerator.save_state`` saves."""
        return {
            "epoch": self.epoch,
            "samples": self.samples,
            "step": self.step,
            "micro_batch": self.run.micro_batcher.state(),
        }

    def load_state_dict(self, state: Any) -> None:
        """Restore what ``Accelerator.load_state`` has read."""
        self.epoch = state["epoch"]
        self.samples = state["samples"]
        self.step = self._saved_step = state["step"]
        self.run.micro_batcher.restore(state["micro_batch"])

    def _step_done(self) -> None:
        self._steps.done(self.step, self._total, self._loss)
        self._loss = None
        if self.run.should_stop():
            self.save()
            live_of(self.run).saves.finish()
            raise TrainingStopped(f"stopped after step {self.step}")
        if self.run.should_save():
            self.save()


def _divide(loader: Any) -> None:
    """Make accelerate divide each batch of a prepared loader among the ranks."""
    shard = getattr(loader, "batch_sampler", None)
    if not isinstance(shard, _loaders.BatchSamplerShard):
        raise UserError(
            "loader: is not divided among the ranks; pass it to accelerator.prepare, without "
            "dispatch_batches"
        )
    shard.split_batches = True
    shard.even_batches = False


def _check(accelerator: Any, run: Run) -> None:
    if accelerator.num_processes != run.world_size:
        raise UserError(
            f"Accelerator: has {accelerator.num_processes} processes, but this attempt has "
            f"{run.world_size}: start it with train_robust.py num_gpus=…, not with accelerate "
            "launch"
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise UserError(
            "Accelerator: has an accumulation of its own, which divides the gradients again; leave "
            "gradient_accumulation_steps out and set training.gradient_accumulation_steps"
        )
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise UserError(
            "Accelerator: automatic_checkpoint_naming hides checkpoints from later attempts; leave "
            "it out"
        )
