"""transformers' ``Trainer`` under the launcher: :func:`training_arguments` and :func:`fit`.

::

    def train(cfg, run):
        arguments = TrainingArguments(**training_arguments(cfg, run), num_train_epochs=3)
        trainer = Trainer(model, arguments, train_dataset=texts, eval_dataset=others)
        return fit(trainer, cfg=cfg, run=run, metric="eval_loss")
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from robust_train.config.extras import require
from robust_train.errors import Interrupted, UserError
from robust_train.failures import classify_failure
from robust_train.integrations.one_process import refuse_ranks
from robust_train.integrations.result import chosen
from robust_train.run import Run
from robust_train.runfolder.cadence import SavePlan
from robust_train.values import MEMORY_FAILURES

_NEEDED_BY = "robust_train.integrations.transformers"
require("accelerate", _NEEDED_BY, extra="transformers")  # Trainer cannot be had without it
_transformers = require("transformers", _NEEDED_BY, extra="transformers")

log = logging.getLogger("robust_train.vision")

__all__ = ["RobustCallback", "fit", "training_arguments"]

_MARK = "robust_train.json"
"""Lies in a checkpoint that was written to its end; the Trainer writes many files in place."""


def training_arguments(cfg: DictConfig, run: Run) -> dict[str, Any]:
    """What of ``TrainingArguments`` belongs to the launcher, for this attempt.

    Device, micro-batch, accumulation, data-loader workers, seeds, the folder of the checkpoints,
    how many of them are kept, and the one to go on from. Everything else is the trainer's own.
    """
    refuse_ranks(run, "transformers")
    training = cfg.training
    workers = training.num_workers
    checkpoint = _existing(run)
    return {
        "output_dir": str(run.checkpoint_dir),
        "use_cpu": cfg.device == "cpu",
        "per_device_train_batch_size": training.batch_size,
        "per_device_eval_batch_size": training.batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "resume_from_checkpoint": None if checkpoint is None else str(checkpoint),
        "auto_find_batch_size": False,
        "ignore_data_skip": False,
        "dataloader_num_workers": workers,
        "dataloader_prefetch_factor": training.prefetch_factor if workers else None,
        "seed": training.seed,
        "data_seed": training.seed,
        # the last but one must not go before the launcher has heard of the last
        "save_total_limit": max(training.keep_checkpoints, 2),
    }


def fit(trainer: Any, *, cfg: DictConfig, run: Run, metric: str | None = None) -> Any:
    """``trainer.train`` as an attempt: it goes on from the last checkpoint and stops when asked to.

    Args:
        trainer: a ``transformers.Trainer`` or one derived from it, made with
            :func:`training_arguments`.
        cfg: the config that the launcher gave to the trainer function.
        run: the run that it gave.
        metric: name of a figure of the last evaluation, such as ``eval_loss``, which becomes the
            job's result; None: all of them.

    Returns:
        The figure, or all of the last evaluation as a dictionary.

    Raises:
        UserError: the trainer cannot keep the effective batch; the message says why.
        Interrupted: the run was asked to stop; a checkpoint was saved.
    """
    refuse_ranks(run, "transformers")
    _check(trainer.args, cfg)
    if run.stop_requested:
        raise Interrupted("stopped before the first step")
    callback = RobustCallback(cfg, run)
    trainer.add_callback(callback)
    checkpoint = trainer.args.resume_from_checkpoint
    if checkpoint is not None:
        _compare(Path(checkpoint), cfg)
    try:
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        except _AlreadyDone:
            log.info("training was complete already")
        return _result(trainer, metric)
    except _StoppedInEvaluation:
        if not (_folder(trainer.args, trainer.state) / _MARK).exists():
            # nothing was trained since the last step: its state is all here
            trainer._save_checkpoint(trainer.model, trial=None)
            callback.saved(trainer.args, trainer.state)
        raise Interrupted(f"stopped after step {trainer.state.global_step}") from None
    except Exception as error:
        if classify_failure(error).kind in MEMORY_FAILURES:
            run.memory_milestone("out of memory")
        raise


class _AlreadyDone(Exception):
    """The checkpoint is that of the last step; the Trainer would make one step too many."""


class _StoppedInEvaluation(Exception):
    """The run was asked to stop while the Trainer evaluates."""


_TrainerCallback: Any = _transformers.TrainerCallback


class RobustCallback(_TrainerCallback):  # type: ignore[misc]
    """What :func:`fit` adds to a trainer: checkpoints, journal, and stopping.

    Args:
        cfg: the config that the launcher gave to the trainer function.
        run: the run that it gave.
    """

    def __init__(self, cfg: DictConfig, run: Run) -> None:
        self.run = run
        self._training = cfg.training
        run.saving.plan = SavePlan.of(cfg)
        self._loss: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The batches must be those of this attempt, whatever the checkpoint says."""
        batches = getattr(others.get("train_dataloader"), "batch_sampler", None)
        size = getattr(batches, "batch_size", None)
        if size is not None and size != self._training.batch_size:
            raise UserError(
                f"Trainer: makes batches of {size}, but this attempt is to use "
                f"{self._training.batch_size}; a get_train_dataloader of your own has to take it "
                "from args.train_batch_size"
            )
        self.run.started(state.global_step)
        self.run.memory_milestone("training begins")

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """A step may come although all are done, where ``max_steps`` ends within an epoch."""
        if state.global_step >= state.max_steps:
            raise _AlreadyDone

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> Any:
        """After an optimizer step: save if it is time, or if asked to stop."""
        is_first = self.run.last_step is None
        if self.run.progress(state.global_step, total_steps=state.max_steps, **self._loss):
            self._loss = {}
        if is_first:
            self.run.memory_milestone("first step done")
        saves_soon = args.save_strategy == "epoch" and state.epoch == round(state.epoch)
        if self.run.stop_requested:
            control.should_evaluate = False
            control.should_save = True
        elif self.run.checkpoint_due and not saves_soon:
            control.should_save = True
        self._before_saving(args, state, control)
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The Trainer may save and evaluate once more."""
        self._before_saving(args, state, control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Evaluation may last; what it has computed so far is not kept."""
        if self.run.stop_requested:
            raise _StoppedInEvaluation

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        """What the Trainer logs goes into the journal."""
        figures = _numbers(logs or {})
        if "loss" in figures:
            self._loss = {"loss": figures["loss"]}
        self.run.record("metrics", {"step": state.global_step, **figures})

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Saving comes after evaluating, and its time is not saving's."""
        self.run.saving.clock.begin(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """A checkpoint is complete; if asked to stop, this is the moment."""
        self.saved(args, state)
        if self.run.stop_requested:
            raise Interrupted(f"stopped after step {state.global_step}")

    def _before_saving(self, args: Any, state: Any, control: Any) -> None:
        """A checkpoint of this very step would be written over, file by file."""
        if control.should_save:
            (_folder(args, state) / _MARK).unlink(missing_ok=True)

    def saved(self, args: Any, state: Any) -> None:
        """Announce the checkpoint of this step."""
        path = _folder(args, state)
        mark = {"effective_batch_size": _effective(self._training)}
        (path / _MARK).write_text(json.dumps(mark))
        self.run.checkpoint_saved(path, state.global_step)


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir).absolute() / f"checkpoint-{state.global_step}"


def _check(args: Any, cfg: DictConfig) -> None:
    training = cfg.training
    wanted = {
        "per_device_train_batch_size": training.batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
    }
    for name, value in wanted.items():
        if getattr(args, name) != value:
            raise UserError(
                f"TrainingArguments: {name}={getattr(args, name)}, but this attempt is to use "
                f"{value}; pass **training_arguments(cfg, run) and leave {name} out"
            )
    if args.n_gpu > 1 or args.world_size > 1:
        raise UserError(
            f"TrainingArguments: would train on {max(args.n_gpu, args.world_size)} devices; an "
            "attempt has one: leave isolation=process, or set CUDA_VISIBLE_DEVICES to one GPU"
        )
    refused = {
        "auto_find_batch_size": "the launcher chooses the batch, and keeps the effective one",
        "ignore_data_skip": "a resumed epoch would begin anew",
        "save_only_model": "nobody can go on from weights alone",
        "dataloader_drop_last": "which samples are left out would depend on the micro-batch; "
        "shorten the data set instead",
    }
    for name, why in refused.items():
        if getattr(args, name, False):
            raise UserError(f"TrainingArguments: {name}=True: {why}; leave it out")


def _compare(checkpoint: Path, cfg: DictConfig) -> None:
    """The Trainer counts steps: its place in the data is right while they keep their size."""
    there = json.loads((checkpoint / _MARK).read_text())["effective_batch_size"]
    here = _effective(cfg.training)
    if there != here:
        log.warning(
            "the checkpoint was written at an effective batch size of %d, now it is %d: the "
            "Trainer counts steps, so this epoch goes on at another sample",
            there,
            here,
        )


def _effective(training: Any) -> int:
    return int(training.batch_size * training.gradient_accumulation_steps)


def _existing(run: Run) -> Path | None:
    """The checkpoint to go on from, or where that is gone, the newest complete one."""
    if run.resume_checkpoint is None:
        return None
    wanted = Path(run.resume_checkpoint)
    if (wanted / _MARK).exists():
        return wanted
    complete = [mark.parent for mark in run.checkpoint_dir.glob(f"checkpoint-*/{_MARK}")]
    newest = max(complete, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    log.warning(
        "the checkpoint %s is gone or incomplete: training goes on from %s",
        wanted,
        newest or "the beginning",
    )
    return newest


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in logs.items() if isinstance(value, (int, float))}


def _result(trainer: Any, metric: str | None) -> Any:
    state = trainer.state
    found: dict[str, float] = {}
    for entry in state.log_history:
        if entry["step"] == state.global_step:
            found |= _numbers(entry)
    is_evaluated = any(name.startswith("eval_") for name in found)
    if trainer.eval_dataset is not None and not is_evaluated:
        found |= _numbers(trainer.evaluate())
    return chosen(metric, found)
