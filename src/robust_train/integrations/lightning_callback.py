"""The callback that connects a Lightning ``Trainer`` to the launcher.

`lightning.fit` adds it to the trainer, in the attempt's process, on every rank. The callback saves
and resumes checkpoints, reports steps, and stops the trainer on request.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from robust_train.attempt.run import Run, live_of
from robust_train.compat import step_schedulers
from robust_train.integrations.lightning_position import LightningPosition, counters_at
from robust_train.integrations.sample_order import SampleOrder, StepShares, take_over
from robust_train.integrations.steering import Steps, lightning
from robust_train.model.errors import UserError
from robust_train.step.ranks import of_all_ranks
from robust_train.step.rng import capture_rng, restore_rng

log = logging.getLogger("robust_train.integrations")

_SUFFIX = ".ckpt"
_Checkpoint: Any = lightning(".callbacks").Checkpoint
_WeightAveraging: Any = lightning(".callbacks").StochasticWeightAveraging
_plugins = lightning(".plugins.io")


class Stopped(Exception):  # noqa: N818 - an event
    """Raised to leave ``trainer.fit`` at once.

    Lightning does not catch it, unlike a KeyboardInterrupt, which it turns into an exit.
    """


class RobustCallback(_Checkpoint):  # type: ignore[misc]
    """Adds resuming, checkpoints, progress reports and stopping to a trainer.

    It derives from ``Checkpoint``, because Lightning calls such callbacks last, after the user's.

    Attributes:
        shares: the samples of each optimizer step and of this rank.
        position: the position after the last optimizer step.
        done: the micro-batches of the current step that are done.
    """

    def __init__(self, cfg: DictConfig, run: Run) -> None:
        self.run = run
        self.shares = StepShares(
            cfg.training.batch_size,
            cfg.training.gradient_accumulation_steps,
            run.rank,
            run.world_size,
        )
        self.position = LightningPosition()
        self.done = 0
        self._order: SampleOrder | None = None
        self._cfg = cfg
        self._steps = Steps(cfg, run)
        # This callback's part of the checkpoint that the fit resumes from, until training starts.
        self._restored: Any = None
        self._saved_step: int | None = None
        self._is_saving = False  # whether `save` is writing a checkpoint
        # False only while the epoch's validation runs, so that a checkpoint saved in the middle of
        # it has this value.
        self._is_validated = True
        # The samples of the current step, by their index in the epoch's order.
        self._step = range(0)
        self._sigterm: Any = signal.SIG_DFL  # the handler before Lightning's
        # `setup` sets both attributes.
        self._trainer: Any
        self._device: Any

    def order_samples(self, loader: Any, name: str) -> None:
        """Give the training samples an order that a resumed run can continue."""
        self._order = take_over(loader, name=name, shares=self.shares, seed=self._cfg.seed)
        self.position = replace(self.position, epoch_samples=self._order.samples)
        self._move_order()

    def _move_order(self) -> None:
        """Let the loader's next pass start at the current position."""
        if self._order is None:
            return
        position = self.position
        if position.samples >= position.epoch_samples:
            self._order.begin(position.epoch + 1)
        else:
            self._order.begin(position.epoch, position.samples)

    def state_dict(self) -> dict[str, object]:
        """Return this callback's part of a checkpoint. Lightning calls it whenever it saves."""
        position = self.position
        # If a callback saves before this callback's turn, the batch has not been counted yet.
        if self._trainer.global_step != position.step:
            position = self._after_batch()
        return {
            "position": asdict(position),
            "rng": capture_rng(self._device),
            "ends": self._trainer.should_stop,
            "figures": logged_figures(self._trainer),
            "is_validated": self._is_validated,
        }

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Convert the loops' counters to this attempt's micro-batches."""
        restored = checkpoint["callbacks"].get(self.state_key)
        if restored is None:
            raise UserError(
                f"checkpoint {trainer.ckpt_path}: was not written under robust_train; start in "
                "another run folder, or load its weights in the model"
            )
        for callback in trainer.callbacks:
            # A logger creates a new folder for each attempt. A ModelCheckpoint whose folder has
            # changed would forget its best checkpoints.
            state = checkpoint["callbacks"].get(callback.state_key, {})
            if "dirpath" in state:
                state["dirpath"] = callback.dirpath
        self._restored = restored
        self.position = LightningPosition(**restored["position"])
        checkpoint["loops"]["fit_loop"] = counters_at(
            checkpoint["loops"]["fit_loop"],
            self.position,
            self.shares.at_once,
            is_manual=not pl_module.automatic_optimization,
        )
        self._move_order()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Report every checkpoint that the trainer writes, whichever callback asked for it."""
        if stage != "fit":
            return
        self._trainer = trainer
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
            if self._is_saving:
                self._saved_step = checkpoint["global_step"]
                keep = self._cfg.training.keep_checkpoints
                live_of(self.run).save_content(
                    checkpoint, self._saved_step, keep=keep, suffix=_SUFFIX
                )
                return
            write(checkpoint, path, **options)
            # A checkpoint with weights alone cannot resume training, so it is not reported.
            if "optimizer_states" in checkpoint and Path(path).exists():
                self._saved_step = checkpoint["global_step"]
                self.run.checkpoint_saved(Path(path).absolute(), self._saved_step)

        writer.save_checkpoint = save_checkpoint

    def leave(self, trainer: Any) -> None:
        """Remove this callback from the trainer, which the program may use again after the fit."""
        trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self]
        vars(trainer.strategy.checkpoint_io).pop("save_checkpoint", None)

    def on_sanity_check_start(self, *_: Any) -> None:
        """Restore the SIGTERM handler. Lightning's handler ends the run in the middle of a step."""
        is_main_thread = threading.current_thread() is threading.main_thread()
        if self._sigterm not in (signal.SIG_DFL, None) and is_main_thread:
            signal.signal(signal.SIGTERM, self._sigterm)

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """Check the sample order, restore the rest of the checkpoint, and report the start."""
        # Without a sanity check, Lightning has not called this method.
        self.on_sanity_check_start()
        batches = getattr(trainer.train_dataloader, "batch_sampler", None)
        if self.shares.ranks > 1 and getattr(batches, "sampler", None) is not self._order:
            raise UserError(
                "Trainer: gives the ranks samples in another order; pass "
                "**trainer_arguments(cfg, run), which has use_distributed_sampler=False"
            )
        if self._restored is not None:
            self._restore(trainer, self._restored)
            self._restored = None
        self._begin_step(0 if self.position.is_between_epochs else self.position.samples)
        self.run.started(trainer.global_step)
        live_of(self.run).reports.record_memory("fit begins")
        # ModelCheckpoint and EarlyStopping name the figures that they monitor.
        for callback in trainer.callbacks:
            if getattr(callback, "monitor", None) is not None:
                mode = getattr(callback, "mode", "min")
                live_of(self.run).reports.monitor(callback.monitor, mode)

    def _restore(self, trainer: Any, restored: Any) -> None:
        """Restore from the checkpoint what Lightning does not restore itself."""
        restore_rng(restored["rng"], self._device)
        trainer.should_stop = restored["ends"]
        for name, value in restored["figures"].items():
            trainer.callback_metrics[name] = torch.tensor(value)
        is_whole_epoch = self.position.samples == self.position.epoch_samples
        averages_weights = any(
            isinstance(callback, _WeightAveraging) for callback in trainer.callbacks
        )
        if is_whole_epoch and restored["is_validated"]:
            self._step_plateau_schedulers(trainer)
        elif averages_weights and not self.position.is_between_epochs:
            log.warning(
                "StochasticWeightAveraging: Lightning restores it when the next epoch starts; "
                "the rest of this epoch has the learning rate without it"
            )

    def _step_plateau_schedulers(self, trainer: Any) -> None:
        """Step each ReduceLROnPlateau for the last epoch, which Lightning does after it saves."""
        for config in trainer.lr_scheduler_configs:
            figure = trainer.callback_metrics.get(config.monitor)
            is_due = (self.position.epoch + 1) % config.frequency == 0
            is_once_per_epoch = config.reduce_on_plateau and config.interval == "epoch"
            if is_once_per_epoch and is_due and figure is not None:
                trainer.lightning_module.lr_scheduler_step(config.scheduler, figure)

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        """Start an epoch. Lightning does not call it if the fit resumes within an epoch."""
        live_of(self.run).speed.begin()
        live_of(self.run).speed.wait_begins()
        self.position = replace(self.position, epoch=trainer.current_epoch, samples=0)
        self._begin_step(0)
        if self._order is not None:
            # A loader that was reloaded has made one pass more than there were epochs.
            self._order.begin(trainer.current_epoch)

    def on_train_batch_start(self, *_: Any) -> None:
        """End the time that the step has waited for its data."""
        live_of(self.run).speed.wait_ends()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Weight the loss so that every sample of a step counts the same."""
        weight = self.shares.weight(self._step, self.done)

        def scale(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * weight

        if weight != 1 and loss.requires_grad:
            loss.register_hook(scale)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Count the batch. After an optimizer step, report, save if due, and stop if requested."""
        before = self.position
        after = self._after_batch()
        self.done += 1
        if after.samples == self._step.stop:
            self._begin_step(after.samples)
        is_step = after.step != before.step
        # With manual optimization, an epoch may end without a step. Its gradients stay.
        if is_step or after.samples == after.epoch_samples:
            self.position = after
        if is_step:
            self._after_step(trainer, outputs)
        live_of(self.run).speed.wait_begins()

    def _after_batch(self) -> LightningPosition:
        """Return the position once the current batch is done."""
        samples = self._step.start + (self.done + 1) * self.shares.at_once
        samples = min(samples, self._step.stop)
        return replace(self.position, samples=samples, step=self._trainer.global_step)

    def _after_step(self, trainer: Any, outputs: Any) -> None:
        """Report an optimizer step, stop if requested, and save if a checkpoint is due."""
        total: Any = trainer.estimated_stepping_batches
        if total == float("inf") or not trainer.lightning_module.automatic_optimization:
            total = None
        loss = None
        if isinstance(outputs, Mapping) and "loss" in outputs:
            # Lightning has divided the loss by the accumulation.
            loss = outputs["loss"] * trainer.accumulate_grad_batches
        self._steps.report(trainer.global_step, total, loss)
        self._stop_if_requested(trainer)
        # At the end of an epoch, `on_train_epoch_end` saves, after validation has logged figures.
        is_within_epoch = self.position.samples < self.position.epoch_samples
        if is_within_epoch and self.run.should_save():
            self.save(trainer)

    def on_validation_start(self, *_: Any) -> None:
        """Pause the speed meter, so that validation does not count as training time."""
        live_of(self.run).speed.pause()

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        """Stop during validation if requested. Its results are not kept."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._is_validated = False
            self._stop_if_requested(trainer)
            self._is_validated = True

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        """Record the figures in the journal."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            figures = logged_figures(trainer)
            self.run.record("validation", {"step": trainer.global_step, **figures})

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save a checkpoint if one is due, unless another callback has just saved this step."""
        step_schedulers(trainer)
        step = trainer.global_step
        saved = self._saved()
        if not step and not pl_module.automatic_optimization:
            raise UserError(
                f"{type(pl_module).__name__}: no optimizer step in an epoch with manual "
                "optimization: step the optimizers that self.optimizers() returns"
            )
        if saved == step:
            return
        total = trainer.estimated_stepping_batches
        epochs = trainer.current_epoch + 1
        is_last = step == total or epochs == trainer.max_epochs
        if is_last or saved is None or self.run.should_save():
            self.save(trainer)

    def save(self, trainer: Any) -> None:
        """Save a checkpoint into the run folder, and remove old ones beyond keep_checkpoints."""
        self._is_saving = True
        try:
            trainer.save_checkpoint(
                self.run.checkpoint_dir / f"step-{self.position.step:08d}{_SUFFIX}",
                # Without this argument, Lightning logs a line for each checkpoint.
                weights_only=False,
            )
        finally:
            self._is_saving = False

    def _saved(self) -> int | None:
        """Return the step of the last checkpoint. Only the first rank knows it, and sends it."""
        saved: int | None = of_all_ranks(self._saved_step)[0]
        return saved

    def _begin_step(self, start: int) -> None:
        """Set the current step to the samples from ``start``. At the epoch's end there are none."""
        self.done = 0
        steps = self.shares.steps(self.position.epoch_samples, start)
        self._step = next(steps, range(0))

    def _stop_if_requested(self, trainer: Any) -> None:
        """Save a checkpoint of the last step and leave the fit if a stop was requested."""
        if not self.run.should_stop():
            return
        if self._saved() != self.position.step:
            self.save(trainer)
        raise Stopped(f"stopped after step {self.position.step}")


def logged_figures(trainer: Any) -> dict[str, float]:
    """Return the latest value of each figure that the model has logged."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}
