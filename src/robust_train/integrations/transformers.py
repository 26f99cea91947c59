"""Runs transformers' ``Trainer`` as an attempt: `training_arguments` and `fit`.

A trainer function calls both in the attempt's process, on every rank::

    def train(cfg, run):
        arguments = TrainingArguments(**training_arguments(cfg, run), num_train_epochs=3)
        trainer = Trainer(model, arguments, train_dataset=texts, eval_dataset=others)
        return fit(trainer, cfg=cfg, run=run, metric="eval_loss")
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from robust_train.attempt.checkpoint_errors import run_on_all_ranks
from robust_train.attempt.last_save import save_last_again, settle_by_best
from robust_train.attempt.run import Run, live_of
from robust_train.compat import intercept_saves, load_best, save_trainer
from robust_train.config.trainers import require
from robust_train.folder.checkpoint_files import is_whole
from robust_train.integrations.sample_order import SampleOrder, order_of_epochs
from robust_train.integrations.steering import (
    Steps,
    framework,
    refuse_saving_on_each_node,
    result_of,
)
from robust_train.integrations.transformers_step import recover_in_steps
from robust_train.model.errors import TrainingStopped, UserError
from robust_train.step.ranks import of_all_ranks

_NEEDED_BY = "robust_train.integrations.transformers"
# The Trainer cannot be imported without accelerate.
require("accelerate", _NEEDED_BY, extra="transformers")
_transformers = framework("transformers")

log = logging.getLogger("robust_train.integrations")

__all__ = ["fit", "training_arguments"]

_MARK = "robust_train.tmp"
"""A file in a checkpoint's folder that marks it as unfinished.

The Trainer writes a checkpoint's files one by one into its final folder.
"""


def training_arguments(cfg: DictConfig, run: Run) -> dict[str, Any]:
    """Return the arguments for ``TrainingArguments`` that the launcher decides in this attempt.

    They set the device, micro-batch, accumulation, data-loader workers and seeds, the folder of
    checkpoints, how many to keep, and the checkpoint to resume from.
    """
    training = cfg.training
    spec = live_of(run).parts.asked
    workers = training.num_workers
    checkpoint = run.resume_checkpoint
    # eval_loss is a mean over batches, so all attempts of a job evaluate in the same batches.
    eval_batch_size = training.batch_size if spec is None else spec.batch_size
    return {
        "output_dir": str(run.checkpoint_dir),
        "use_cpu": cfg.device == "cpu",
        "per_device_train_batch_size": training.batch_size,
        "per_device_eval_batch_size": eval_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "resume_from_checkpoint": None if checkpoint is None else str(checkpoint),
        "auto_find_batch_size": False,
        "ignore_data_skip": False,
        "dataloader_num_workers": workers,
        "dataloader_prefetch_factor": training.prefetch_factor if workers else None,
        "seed": cfg.seed,
        "data_seed": cfg.seed,
        # The last checkpoint but one must stay until the launcher knows about the last.
        "save_total_limit": max(training.keep_checkpoints, 2),
    }


def fit(trainer: Any, *, cfg: DictConfig, run: Run, metric: str | None = None) -> Any:
    """Run ``trainer.train`` as an attempt: resume from the last checkpoint, stop on request.

    Args:
        trainer: a ``transformers.Trainer`` or a subclass, created with `training_arguments`.
        cfg, run: the arguments of the trainer function.
        metric: the figure of the last evaluation to return, such as ``eval_loss``. None: a
            dictionary of all figures.

    Raises:
        UserError: the trainer cannot keep the effective batch. The message has the reason.
        TrainingStopped: a stop was requested, and a checkpoint was saved.
    """
    _check(trainer.args, cfg, run)
    if run.should_stop():
        raise TrainingStopped("stopped before the first step")
    _checkpoint_gradients(trainer, cfg)
    if live_of(run).losses.leaves_out:
        # With this filter, the Trainer would log a mean in place of a loss that is not finite.
        trainer.args.logging_nan_inf_filter = False
    callback = TransformersCallback(cfg, run)
    trainer.add_callback(callback)
    _save_through(callback, trainer)
    recover_in_steps(trainer, run)
    _watch_losses(callback, trainer)
    if run.is_main:
        # A killed attempt may leave an unfinished folder, which the Trainer would count as a
        # checkpoint.
        for mark in Path(trainer.args.output_dir).glob(f"checkpoint-*/{_MARK}"):
            shutil.rmtree(mark.parent, ignore_errors=True)
    try:
        try:
            _train(trainer, run)
        except _AlreadyDone:
            log.info("training was complete already")
            if trainer.args.load_best_model_at_end:
                load_best(trainer)
        return _result(trainer, metric)
    except _StoppedInEvaluation:
        live_of(run).saves.finish()
        is_saved = is_whole(_folder(trainer.args, trainer.state))
        is_saved_on_first_rank = of_all_ranks(is_saved)[0]
        if not is_saved_on_first_rank:
            # The weights are still those of the last step, because only evaluation ran since.
            save_trainer(trainer)
        raise TrainingStopped(f"stopped after step {trainer.state.global_step}") from None
    finally:
        live_of(run).saves.finish()


class _AlreadyDone(Exception):  # noqa: N818 - an event
    """Raised if the checkpoint is already of the last step.

    The Trainer would make another step.
    """


class _StoppedInEvaluation(Exception):  # noqa: N818 - an event
    """Raised if a stop is requested while the Trainer evaluates."""


def _save_through(callback: TransformersCallback, trainer: Any) -> None:
    """Let the callback write and report every checkpoint of the trainer."""

    def save(write: Callable[[], None]) -> None:
        callback.save(write, trainer.args, trainer.state)

    intercept_saves(trainer, save)


def _watch_losses(callback: TransformersCallback, trainer: Any) -> None:
    """Pass each batch's share of its step's loss to the callback."""
    run_step = trainer.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        loss = run_step(*args, **kwargs)
        callback.add_loss(loss)
        return loss

    trainer.training_step = training_step


def _train(trainer: Any, run: Run) -> None:
    """Train to the end, and settle which checkpoint is the job's last or best."""
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    live_of(run).saves.finish()
    best = trainer.state.best_model_checkpoint
    if trainer.args.load_best_model_at_end and best and Path(best).exists():
        settle_by_best(live_of(run))
    else:
        save_last_again(live_of(run), lambda: save_trainer(trainer))


_TrainerCallback: Any = _transformers.TrainerCallback


class TransformersCallback(_TrainerCallback):  # type: ignore[misc]
    """Adds checkpoints, progress reports and stopping to a trainer."""

    def __init__(self, cfg: DictConfig, run: Run) -> None:
        self.run = run
        self._cfg = cfg
        self._steps = Steps(cfg, run)
        self._loss: Any = None  # of the current step
        self._order: SampleOrder | None = None
        # Whether a callback had ended the training before the checkpoint was saved.
        self._has_ended = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Check the batch size, and let the order of samples depend on seed and epoch alone.

        Without that, a sampler may draw from torch's generator, which dropout shares.
        """
        loader = others["train_dataloader"]
        batches = getattr(loader, "batch_sampler", None)
        size = getattr(batches, "batch_size", None)
        if size is not None and size != self._cfg.training.batch_size:
            raise UserError(
                f"Trainer: makes batches of {size}, but this attempt uses "
                f"{self._cfg.training.batch_size}; if you override get_train_dataloader, take the "
                "batch size from args.train_batch_size"
            )
        self._order = order_of_epochs(loader, args.seed)
        control_when_saved = state.stateful_callbacks.get("TrainerControl", {})
        self._has_ended = control_when_saved.get("args", {}).get("should_training_stop")
        if batches is None and state.global_step:
            log.warning(
                "Trainer: continues in an iterable data set as if in its first pass, and with "
                "other samples if torch's generator shuffles them; a data set with a length "
                "resumes exactly"
            )
        elif self._order is None and state.global_step:
            log.warning(
                "Trainer: skips as many batches of the %s as the earlier steps had; if its batches "
                "depend on the batch size, or torch's generator shuffles them, some samples are "
                "seen again and as many are left out",
                type(batches).__name__,
            )
        self.run.started(state.global_step)
        live_of(self.run).reports.record_memory("training begins")
        name = args.metric_for_best_model or "loss"
        if not name.startswith("eval_"):
            name = f"eval_{name}"
        mode = "max" if args.greater_is_better else "min"
        live_of(self.run).reports.monitor(name, mode)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Start the time that the epoch's first step waits for its data."""
        if self._order is not None:
            self._order.begin(int(state.epoch))
        live_of(self.run).speed.begin()
        live_of(self.run).speed.wait_begins()

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """End the wait for data, and raise if training is complete already.

        The Trainer would make one more step if the last step is within an epoch.
        """
        live_of(self.run).speed.wait_ends()
        self._loss = None
        if self._has_ended or state.global_step >= state.max_steps:
            raise _AlreadyDone

    def add_loss(self, loss: Any) -> None:
        """Add a batch's share of the current step's loss.

        The value that the Trainer logs is a mean over several steps.
        """
        self._loss = loss if self._loss is None else self._loss + loss

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> Any:
        """Report an optimizer step, and save if a checkpoint is due or a stop is requested."""
        live_of(self.run).losses.take(state.global_step, self._loss)
        self._steps.report(state.global_step, state.max_steps)
        saves_soon = args.save_strategy == "epoch" and state.epoch == round(state.epoch)
        if self.run.should_stop():
            control.should_evaluate = False
            control.should_save = True
        elif self.run.should_save() and not saves_soon:
            control.should_save = True
        live_of(self.run).speed.wait_begins()
        return control

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        """Stop during evaluation if requested. Its results are not kept."""
        if self.run.should_stop():
            raise _StoppedInEvaluation

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        """Record what the Trainer logs in the journal."""
        figures = _numbers(logs or {})
        if "loss" in figures:
            self._steps.set_loss(figures["loss"])
        if "train_loss" in figures:
            # Training has ended. The Trainer may load the best checkpoint next.
            live_of(self.run).saves.finish()
        self.run.record("metrics", {"step": state.global_step, **figures})

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Start measuring the time of saving, which follows, and leave evaluation out."""
        live_of(self.run).saving.clock.begin(state.global_step)
        live_of(self.run).speed.pause()

    def save(self, write: Callable[[], None], args: Any, state: Any) -> None:
        """Save a checkpoint, marked as unfinished until all its files are written.

        Args:
            write: the Trainer's own method, which writes the files.
            args, state: the Trainer's.
        """
        path = _folder(args, state)
        is_main = self.run.is_main

        def prepare() -> None:
            if is_main:
                path.mkdir(parents=True, exist_ok=True)
                (path / _MARK).touch()

        def write_all() -> None:
            # If `prepare` fails on the first rank, no rank may enter the collectives of `write`.
            run_on_all_ranks(prepare, of_all_ranks)
            write()

        def publish() -> Path:
            (path / _MARK).unlink()
            return path

        saves = live_of(self.run).saves

        def save_files() -> None:
            # The Trainer removes old checkpoints itself.
            folder = saves.folder(keep=0)
            folder.save_files(
                path, state.global_step, write=write_all, publish=publish, at_once=args.push_to_hub
            )

        saves.try_to_write(save_files)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Stop after a save if requested."""
        if self.run.should_stop():
            raise TrainingStopped(f"stopped after step {state.global_step}")


def _folder(args: Any, state: Any) -> Path:
    """Return the folder into which the Trainer saves the current step."""
    return Path(args.output_dir).absolute() / f"checkpoint-{state.global_step}"


def _check(args: Any, cfg: DictConfig, run: Run) -> None:
    """Raise UserError if arguments would change the effective batch or break resuming."""
    training = cfg.training
    required = {
        "per_device_train_batch_size": training.batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
    }
    for name, value in required.items():
        if getattr(args, name) != value:
            raise UserError(
                f"TrainingArguments: {name}={getattr(args, name)}, but this attempt uses "
                f"{value}; pass **training_arguments(cfg, run) and leave {name} out"
            )
    if args.n_gpu > 1 or args.world_size != run.world_size:
        raise UserError(
            f"TrainingArguments: would train on {max(args.n_gpu, args.world_size)} devices, but "
            f"this attempt has {run.world_size}: leave isolation=process, and set num_gpus=… for "
            "more"
        )
    refuse_saving_on_each_node("TrainingArguments", args)
    config = args.accelerator_config
    if run.world_size > 1 and (config.split_batches or config.dispatch_batches):
        raise UserError(
            "TrainingArguments: accelerator_config has split_batches or dispatch_batches, which "
            "change the effective batch size with the number of GPUs; leave them out"
        )
    refused = {
        "auto_find_batch_size": "the launcher chooses the micro-batch and keeps the effective "
        "batch",
        "ignore_data_skip": "a resumed epoch would start again",
        "save_only_model": "nothing resumes from weights alone",
        "dataloader_drop_last": "which samples are left out would depend on the micro-batch; "
        "shorten the data set instead",
    }
    for name, why in refused.items():
        if getattr(args, name, False):
            raise UserError(f"TrainingArguments: {name}=True: {why}; leave it out")


def _checkpoint_gradients(trainer: Any, cfg: DictConfig) -> None:
    """Turn on gradient checkpointing if this attempt needs it and the model supports it.

    If the user turned it on, it stays on.
    """
    if not cfg.training.get("gradient_checkpointing"):
        return
    if not getattr(trainer.model, "supports_gradient_checkpointing", False):
        log.warning(
            "training.gradient_checkpointing: has no effect, this model does not support it"
        )
        return
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if hasattr(trainer.args, name):
            setattr(trainer.args, name, True)


def _numbers(logs: Mapping[str, object]) -> dict[str, float]:
    """Return the logged values that are numbers."""
    return {name: value for name, value in logs.items() if isinstance(value, (int, float))}


def _result(trainer: Any, metric: str | None) -> Any:
    """Return a figure of the last step, or all. Evaluate if the trainer has not done so."""
    state = trainer.state
    figures: dict[str, float] = {}
    for entry in state.log_history:
        if entry["step"] == state.global_step:
            figures |= _numbers(entry)
    is_evaluated = any(name.startswith("eval_") for name in figures)
    if trainer.eval_dataset is not None and not is_evaluated:
        figures |= _numbers(trainer.evaluate())
    return result_of(metric, figures)
