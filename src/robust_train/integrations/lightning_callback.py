"""The callback that :func:`robust_train.integrations.lightning.fit` adds to a trainer."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import wraps
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from robust_train.config.extras import require
from robust_train.errors import UserError
from robust_train.integrations.attempt import Steps, effective_batch_size, log_out_of_memory
from robust_train.integrations.lightning_position import (
    ResumePosition,
    loops_at,
    share_of_step,
)
from robust_train.integrations.sample_order import SampleOrder, take_over
from robust_train.microbatch.rng import capture_rng, restore_rng
from robust_train.run import Run

log = logging.getLogger("robust_train.integrations")

_NEEDED_BY = "robust_train.integrations.lightning"
_Checkpoint: Any = require("lightning.pytorch.callbacks", _NEEDED_BY, extra="lightning").Checkpoint
_plugins = require("lightning.pytorch.plugins.io", _NEEDED_BY, extra="lightning")


class Stopped(Exception):
    """Leaves ``trainer.fit`` at once; Lightning would turn a KeyboardInterrupt into an exit."""


class RobustCallback(_Checkpoint):  # type: ignore[misc]
    """Adds resume position, checkpoints, progress and stopping to a trainer.

    It is a ``Checkpoint``, so Lightning calls it after the user's own callbacks.
    """

    def __init__(self, cfg: DictConfig, run: Run) -> None:
        self.run = run
        self.micro_batch: int = cfg.training.batch_size
        self.accumulation: int = cfg.training.gradient_accumulation_steps
        self.position = ResumePosition()
        self._order: SampleOrder | None = None
        self._cfg = cfg
        self._steps = Steps(cfg, run)
        self._restored: Any = None
        self._saved_step: int | None = None
        self._batches = 0  # of this epoch, done
        self._seen = 0  # samples of this epoch, the step in progress included
        self._group = self.accumulation  # micro-batches in the step in progress
        self._sigterm: Any = signal.SIG_DFL

    def own_loader(self, loader: Any, name: str) -> Any:
        """Give the training samples an order that a resumed run can continue."""
        self._order = take_over(
            loader,
            name=name,
            batch_size=self.micro_batch,
            multiple=effective_batch_size(self._cfg),
            seed=self._cfg.training.seed,
        )
        self.position = replace(self.position, epoch_samples=len(self._order))
        self._set_order()
        return loader

    def _set_order(self) -> None:
        position = self.position
        if self._order is not None:
            is_done = position.samples >= position.epoch_samples
            self._order.begin(position.epoch + is_done, 0 if is_done else position.samples)

    def state_dict(self) -> dict[str, object]:
        """Return what Lightning saves in the checkpoint."""
        return {"position": asdict(self.position), "rng": capture_rng(self._device)}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Convert the loops' counters to this attempt's micro-batches."""
        restored = checkpoint["callbacks"].get(self.state_key)
        if restored is None:
            raise UserError(
                f"checkpoint {trainer.ckpt_path}: was not written under robust_train; start in "
                "another run folder, or load its weights in the model"
            )
        self._restored = restored
        self.position = ResumePosition(**restored["position"])
        loops = checkpoint["loops"]
        loops["fit_loop"] = loops_at(loops["fit_loop"], self.position, self.micro_batch)
        self._set_order()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Watch every checkpoint that is written, by whichever callback."""
        if stage != "fit":
            return
        self._device = trainer.strategy.root_device
        self._sigterm = signal.getsignal(signal.SIGTERM)
        writer = trainer.strategy.checkpoint_io
        if isinstance(writer, _plugins.AsyncCheckpointIO):
            raise UserError(
                "AsyncCheckpointIO: does not say when a checkpoint is complete; leave it out"
            )
        write = writer.save_checkpoint

        @wraps(write)
        def save_checkpoint(checkpoint: Any, path: Any, **options: Any) -> None:
            write(checkpoint, path, **options)
            # nothing resumes from weights alone
            if "optimizer_states" in checkpoint and Path(path).exists():
                self._saved_step = checkpoint["global_step"]
                self.run.checkpoint_saved(Path(path).absolute(), self._saved_step)

        writer.save_checkpoint = save_checkpoint

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore random numbers and counters."""
        is_main_thread = threading.current_thread() is threading.main_thread()
        if self._sigterm not in (signal.SIG_DFL, None) and is_main_thread:
            # Lightning's own handler, which replaced the launcher's, ends the run within a step
            signal.signal(signal.SIGTERM, self._sigterm)
        if self._restored is not None:
            restore_rng(self._restored["rng"], self._device)
            self._restored = None
        is_between = self.position.is_between_epochs
        self._seen = 0 if is_between else self.position.samples
        self._batches = 0 if is_between else self.position.batches_done(self.micro_batch)
        self._begin_group()
        self.run.started(trainer.global_step)
        self.run.record_memory("fit begins")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin an epoch; not called if one is resumed in the middle."""
        self.run.speed.begin()
        self.run.speed.wait_begins()
        self.position = replace(self.position, epoch=trainer.current_epoch, samples=0)
        self._seen = self._batches = 0
        self._begin_group()
        if self._order is not None:
            # reloaded data has had one pass more than epochs
            self._order.begin(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Any, *arguments: Any) -> None:
        """Take the time: the batch is there."""
        self.run.speed.wait_ends()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Weight the loss so that every sample of a step counts the same."""
        share = share_of_step(
            self._next_samples(),
            group=self._group,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            left=self.position.epoch_samples - self.position.samples,
        )
        if share != 1 and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * share)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count an optimizer step, save if it is time, stop if requested."""
        self._seen += self._next_samples()
        self._batches += 1
        if trainer.global_step != self.position.step:
            self._after_step(trainer, outputs)
        self.run.speed.wait_begins()

    def _after_step(self, trainer: Any, outputs: Any) -> None:
        self.position = replace(self.position, samples=self._seen, step=trainer.global_step)
        self._begin_group()
        self._step_done(trainer, outputs)
        self._stop_if_requested(trainer)
        # at the end of an epoch once validation has logged its figures
        if self._seen < self.position.epoch_samples and self.run.checkpoint_due:
            self.save(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Leave validation out of the time of the steps."""
        self.run.speed.pause()

    def on_validation_batch_end(self, trainer: Any, *arguments: Any) -> None:
        """Stop during validation if requested; what it has computed is not kept."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._stop_if_requested(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the figures in the journal."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self.run.record("validation", {"step": trainer.global_step, **logged(trainer)})

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save, unless another callback of the trainer has just done it."""
        step = trainer.global_step
        if self._saved_step == step:
            return
        is_last = step == trainer.estimated_stepping_batches
        if is_last or self._saved_step is None or self.run.checkpoint_due:
            self.save(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Log how much memory was in use when it ran out."""
        log_out_of_memory(self.run, exception)

    def save(self, trainer: Any) -> None:
        """Save a checkpoint into the run folder, and remove those that are too many."""
        folder = self.run.checkpoint_dir
        try:
            trainer.save_checkpoint(folder / f"step-{self.position.step:08d}.ckpt")
        except OSError as error:
            log.warning("checkpoint: %s; training goes on, earlier ones are kept", error)
            self.run.checkpoint_failed(str(error))
            return
        self.run.saving.rotate("step-*.ckpt", self._cfg.training.keep_checkpoints)

    def _begin_group(self) -> None:
        self._group = self.accumulation - self._batches % self.accumulation

    def _next_samples(self) -> int:
        return min(self.micro_batch, self.position.epoch_samples - self._seen)

    def _step_done(self, trainer: Any, outputs: Any) -> None:
        step, total = self.position.step, trainer.estimated_stepping_batches
        # reading the loss, which Lightning has divided, waits for the GPU
        if step % max(self._cfg.training.log_every_steps, 1) == 0 and isinstance(outputs, Mapping):
            self._steps.log_loss(float(outputs["loss"]) * self.accumulation)
        self._steps.done(step, None if total == float("inf") else total)

    def _stop_if_requested(self, trainer: Any) -> None:
        if not self.run.stop_requested:
            return
        if self._saved_step != self.position.step:
            self.save(trainer)
        raise Stopped(f"stopped after step {self.position.step}")


def logged(trainer: Any) -> dict[str, float]:
    """Return the latest figures that the model has logged."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}
