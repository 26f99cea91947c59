"""The callback that `fit` adds to a trainer, and its
position in samples."""

from __future__ import annotations

import copy
import logging
import signal
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from robust_train.attempt.run import Run, live_of
from robust_train.compat import step_schedulers
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
    """Leaves ``trainer.fit`` at once. Lightning would turn a KeyboardInterrupt into an exit."""


class RobustCallback(_Checkpoint):  # type: ignore[misc]
    """Adds resume position, checkpoints, progress and stopping to a trainer.

    It is a ``Checkpoint``, so Lightning calls it after the user's callbacks.
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
        self._order: SampleOrder | None = None
        self._cfg = cfg
        self._steps = Steps(cfg, run)
        self._restored: Any = None
        self._saved_step: int | None = None
        self._is_saving = False
        self._is_validated = True  # or is not to be
        # samples of the step in progress, by their place in the epoch
        self._step = range(0)
        self.done = 0  # micro-batches of it that are done
        self._sigterm: Any = signal.SIG_DFL
        # Set by `setup`.
        self._trainer: Any
        self._device: Any

    def own_loader(self, loader: Any, name: str) -> Any:
        """Give the training samples an order that a resumed run can continue."""
        self._order = take_over(loader, name=name, shares=self.shares, seed=self._cfg.seed)
        self.position = replace(self.position, epoch_samples=self._order.samples)
        self._set_order()
        return loader

    def _set_order(self) -> None:
        position = self.position
        if self._order is not None:
            is_done = position.samples >= position.epoch_samples
            self._order.begin(position.epoch + is_done, 0 if is_done else position.samples)

    def state_dict(self) -> dict[str, object]:
        """Return what Lightning saves in the checkpoint."""
        position = self.position
        # If another callback saves first, this callback has not counted the batch yet.
        if self._trainer.global_step != position.step:
            position = self._after_batch()
        return {
            "position": asdict(position),
            "rng": capture_rng(self._device),
            "ends": self._trainer.should_stop,
            "figures": logged(self._trainer),
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
            # a ModelCheckpoint forgets its best ones where its folder has another name, as the one
            # that a logger makes for each attempt
            state = checkpoint["callbacks"].get(callback.state_key, {})
            if "dirpath" in state:
                state["dirpath"] = callback.dirpath
        self._restored = restored
        self.position = LightningPosition(**restored["position"])
        checkpoint["loops"]["fit_loop"] = loops_at(
            checkpoint["loops"]["fit_loop"],
            self.position,
            self.shares.at_once,
            is_manual=not pl_module.automatic_optimization,
        )
        self._set_order()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Watch every checkpoint that is written, by whichever callback."""
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
            # nothing resumes from weights alone
            if "optimizer_states" in checkpoint and Path(path).exists():
                self._saved_step = checkpoint["global_step"]
                self.run.checkpoint_saved(Path(path).absolute(), self._saved_step)

        writer.save_checkpoint = save_checkpoint

    def leave(self, trainer: Any) -> None:
        """Take no part in what the trainer does after this fit."""
        trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self]
        vars(trainer.strategy.checkpoint_io).pop("save_checkpoint", None)

    def on_sanity_check_start(self, *_: Any) -> None:
        """Take SIGTERM back from Lightning, whose handler ends the run within a step."""
        is_main_thread = threading.current_thread() is threading.main_thread()
        if self._sigterm not in (signal.SIG_DFL, None) and is_main_thread:
            signal.signal(signal.SIGTERM, self._sigterm)

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """Restore random numbers and counters, and what came after an epoch's last checkpoint."""
        self.on_sanity_check_start()
        batches = getattr(trainer.train_dataloader, "batch_sampler", None)
        if self.shares.ranks > 1 and getattr(batches, "sampler", None) is not self._order:
            raise UserError(
                "Trainer: gives the ranks samples in an order of its own; pass "
                "**trainer_arguments(cfg, run), which has use_distributed_sampler=False"
            )
        if self._restored is not None:
            restore_rng(self._restored["rng"], self._device)
            trainer.should_stop = self._restored["ends"]
            for name, value in self._restored["figures"].items():
                trainer.callback_metrics[name] = torch.tensor(value)
            is_whole = self.position.samples == self.position.epoch_samples
            if is_whole and self._restored["is_validated"]:
                self._lower_rates(trainer)
            elif not self.position.is_between_epochs and any(
                isinstance(callback, _WeightAveraging) for callback in trainer.callbacks
            ):
                log.warning(
                    "StochasticWeightAveraging: Lightning restores it when the next epoch begins; "
                    "the rest of this one has the learning rate without it"
                )
            self._restored = None
        self._begin_step(0 if self.position.is_between_epochs else self.position.samples)
        self.run.started(trainer.global_step)
        live_of(self.run).reports.record_memory("fit begins")
        # ModelCheckpoint and EarlyStopping name the figures that they monitor.
        for callback in trainer.callbacks:
            if getattr(callback, "monitor", None) is not None:
                live_of(self.run).reports.monitor(
                    callback.monitor, getattr(callback, "mode", "min")
                )

    def _lower_rates(self, trainer: Any) -> None:
        """Make the epoch's step of ReduceLROnPlateau, which comes after the last checkpoint."""
        for config in trainer.lr_scheduler_configs:
            figure = trainer.callback_metrics.get(config.monitor)
            is_due = (self.position.epoch + 1) % config.frequency == 0
            is_of_epochs = config.reduce_on_plateau and config.interval == "epoch"
            if is_of_epochs and is_due and figure is not None:
                trainer.lightning_module.lr_scheduler_step(config.scheduler, figure)

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        """Start an epoch. Not called if an epoch is resumed in the middle."""
        live_of(self.run).speed.begin()
        live_of(self.run).speed.wait_begins()
        self.position = replace(self.position, epoch=trainer.current_epoch, samples=0)
        self._begin_step(0)
        if self._order is not None:
            # reloaded data has had one pass more than epochs
            self._order.begin(trainer.current_epoch)

    def on_train_batch_start(self, *_: Any) -> None:
        """Take the time: the batch is there."""
        live_of(self.run).speed.wait_ends()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Weight the loss so that every sample of a step counts the same."""
        weight = self.shares.weight(self._step, self.done)
        if weight != 1 and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * weight)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Count an optimizer step, save if it is time, stop if requested."""
        before = self.position
        after = self._after_batch()
        self.done += 1
        if after.samples == self._step.stop:
            self._begin_step(after.samples)
        is_step = after.step != before.step
        # manual optimization keeps its gradients
        if is_step or after.samples == after.epoch_samples:
            self.position = after
        if is_step:
            self._after_step(trainer, outputs)
        live_of(self.run).speed.wait_begins()

    def _after_batch(self) -> LightningPosition:
        """Return the position once the batch in progress is done."""
        seen = self._step.start + (self.done + 1) * self.shares.at_once
        return replace(
            self.position, samples=min(seen, self._step.stop), step=self._trainer.global_step
        )

    def _after_step(self, trainer: Any, outputs: Any) -> None:
        total: Any = trainer.estimated_stepping_batches
        if total == float("inf") or not trainer.lightning_module.automatic_optimization:
            total = None
        loss = None
        if isinstance(outputs, Mapping) and "loss" in outputs:
            # Lightning has divided it
            loss = outputs["loss"] * trainer.accumulate_grad_batches
        self._steps.done(trainer.global_step, total, loss)
        self._stop_if_requested(trainer)
        # At the end of an epoch, save only once validation has logged its figures.
        is_within = self.position.samples < self.position.epoch_samples
        if is_within and self.run.should_save():
            self.save(trainer)

    def on_validation_start(self, *_: Any) -> None:
        """Leave validation out of the time of the steps."""
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
            self.run.record("validation", {"step": trainer.global_step, **logged(trainer)})

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save, unless another callback of the trainer has just done it."""
        step_schedulers(trainer)
        step = trainer.global_step
        saved = self._saved()
        if not step and not pl_module.automatic_optimization:
            raise UserError(
                f"{type(pl_module).__name__}: no optimizer step in an epoch with manual "
                "optimization: step those that self.optimizers() returns"
            )
        if saved == step:
            return
        total = trainer.estimated_stepping_batches
        epochs = trainer.current_epoch + 1
        is_last = step == total or epochs == trainer.max_epochs
        if is_last or saved is None or self.run.should_save():
            self.save(trainer)

    def save(self, trainer: Any) -> None:
        """Save a checkpoint into the run folder, and remove those that are too many."""
        self._is_saving = True
        try:
            trainer.save_checkpoint(
                self.run.checkpoint_dir / f"step-{self.position.step:08d}{_SUFFIX}",
                # left out, Lightning logs a line for each checkpoint
                weights_only=False,
            )
        finally:
            self._is_saving = False

    def _saved(self) -> int | None:
        """Return the step of the last checkpoint, of which only the first rank knows."""
        saved: int | None = of_all_ranks(self._saved_step)[0]
        return saved

    def _begin_step(self, start: int) -> None:
        self.done = 0
        self._step = next(self.shares.steps(self.position.epoch_samples, start), range(0))

    def _stop_if_requested(self, trainer: Any) -> None:
        if not self.run.should_stop():
            return
        if self._saved() != self.position.step:
            self.save(trainer)
        raise Stopped(f"stopped after step {self.position.step}")


def logged(trainer: Any) -> dict[str, float]:
    """Return the latest figures that the model has logged."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


# --- the position, and the loops' counters for any micro-batch: Lightning counts batches, whatever
# their size was when the checkpoint was written ---


@dataclass(frozen=True)
class LightningPosition:
    """A position between two optimizer steps."""

    epoch: int = 0  # the current one, from 0
    # samples of this epoch that are done; all of them until the next one begins
    samples: int = 0
    epoch_samples: int = 0  # samples in an epoch; 0 if not known yet
    step: int = 0  # optimizer steps done

    @property
    def is_between_epochs(self) -> bool:
        """No epoch is begun and not done."""
        return self.samples in (0, self.epoch_samples)

    def batches_done(self, at_once: int) -> int:
        """Return the batches of this epoch that are done, as if all had ``at_once`` samples.

        Counted from the epoch's end, so the rest is exactly what the loader will yield.
        """
        left = -(-(self.epoch_samples - self.samples) // at_once)
        return self.batches(at_once) - left

    def batches(self, at_once: int) -> int:
        """Return the batches in a whole epoch."""
        return -(-self.epoch_samples // at_once)


def loops_at(
    fit_loop: Any, position: LightningPosition, at_once: int, *, is_manual: bool = False
) -> Any:
    """Return ``checkpoint["loops"]["fit_loop"]`` as if all batches had ``at_once`` samples.

    Two of Lightning's many restart states are enough: at the end of a batch within an epoch, and
    between two epochs (see ``_TrainingEpochLoop.update_restart_stage`` and
    ``_FitLoop.update_restart_stage``).
    """
    loops = copy.deepcopy(dict(fit_loop))
    done = position.batches_done(at_once)
    before = position.epoch * position.batches(at_once)
    batches = loops["epoch_loop.batch_progress"]
    epochs = loops["epoch_progress"]
    batches["is_last_batch"] = False
    # Manual optimization may step any number of optimizers, so its batches are counted.
    stepped = before + done if is_manual else position.step
    validation = loops["epoch_loop.val_loop.batch_progress"]
    validation["total"] |= _counters(0, 0)
    validation["current"] |= _counters(0, 0)
    if position.is_between_epochs:
        ended = position.epoch + 1 if position.samples > 0 else position.epoch
        completed = before + done
        batches["current"] |= _counters(0, 0)
        counters = _counters(ended, ended)
    else:
        completed = before + done - 1
        batches["current"] |= _counters(done, done - 1)
        counters = _counters(position.epoch + 1, position.epoch)
        counters["processed"] = position.epoch
        stepped -= 1  # it counts this step again on resume
    batches["total"] |= _counters(before + done, completed)
    epochs["total"] |= counters
    epochs["current"] |= counters
    loops["epoch_loop.state_dict"] = {"_batches_that_stepped": stepped}
    return loops


def _counters(begun: int, completed: int) -> dict[str, int]:
    return {"ready": begun, "started": begun, "processed": begun, "completed": completed}
