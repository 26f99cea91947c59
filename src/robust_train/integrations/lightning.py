"""Lightning under the launcher: `fit` instead of ``trainer.fit``.

A trainer function calls it in the attempt's process, on every rank::

    def train(cfg, run):
        trainer = L.Trainer(**trainer_arguments(cfg, run), max_epochs=cfg.training.epochs)
        return fit(trainer, Net(cfg), Digits(cfg), cfg=cfg, run=run, metric="val_accuracy")
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from robust_train import compat
from robust_train.attempt.run import Run, live_of
from robust_train.config.schema import TrainingConfig
from robust_train.config.words import Words
from robust_train.integrations.lightning_callback import RobustCallback, Stopped, logged
from robust_train.integrations.lightning_step import recover_in_steps
from robust_train.integrations.steering import keep_batch, lightning, machines, result_of
from robust_train.model.errors import TrainingStopped, UserError
from robust_train.model.events import BatchTaken
from robust_train.model.spec import AttemptSpec

_pytorch = lightning()
_callbacks = lightning(".callbacks")

log = logging.getLogger("robust_train.integrations")

_ACCUMULATION = "accumulate_grad_batches"

__all__ = ["fit", "trainer_arguments"]


def trainer_arguments(cfg: DictConfig, run: Run) -> dict[str, Any]:
    """Return arguments for ``Trainer``: the attempt's devices and the run folder."""
    device = torch.device(cfg.device)
    nodes = machines()
    arguments: dict[str, Any] = {
        "accelerator": "gpu" if device.type == "cuda" else "cpu",
        "devices": run.world_size // nodes,
        "default_root_dir": str(run.run_dir),
    }
    if run.world_size > 1:
        # fit gives each rank its samples of every step
        arguments |= {"num_nodes": nodes, "strategy": "ddp", "use_distributed_sampler": False}
    elif device.type == "cuda":
        arguments["devices"] = [device.index or 0]
    return arguments


def fit(
    trainer: Any,
    model: Any,
    data: Any,
    *,
    cfg: DictConfig,
    run: Run,
    metric: str | None = None,
    **options: Any,
) -> Any:
    """Run ``trainer.fit`` as an attempt: resume from the last checkpoint, stop on request.

    Args:
        trainer: a ``lightning.Trainer``, created with `trainer_arguments`. Its
            ``accumulate_grad_batches`` is set here.
        model: the ``LightningModule``. With manual optimization and accumulation, it has an
            attribute or hyperparameter ``accumulate_grad_batches``, which is set here.
        data: a ``LightningDataModule``, whose ``batch_size`` (attribute or hyperparameter) is set
            here. Its value is the job's if ``training.batch_size`` is not given. Or a
            ``DataLoader`` created with ``cfg.training.batch_size``. None: the model has the
            loaders.
        cfg, run: the arguments of the trainer function.
        metric: the logged value to return. None: a dictionary of all logged values.
        options: further arguments of ``trainer.fit``, such as ``val_dataloaders``.

    Raises:
        UserError: trainer, model or data cannot keep the effective batch.
        TrainingStopped: a stop was requested, and a checkpoint was saved.
    """
    _fit(trainer.fit, trainer, model, data, cfg=cfg, run=run, **options)
    return _result(trainer, model, data, metric, options.get("val_dataloaders"))


def _fit(
    fit: Callable[..., None],
    trainer: Any,
    model: Any,
    data: Any,
    *,
    cfg: DictConfig,
    run: Run,
    **options: Any,
) -> None:
    has_data = data is not None
    data = model if data is None else data
    cfg = _with_batch_of(data, cfg, run)
    _check(trainer, cfg, run)
    if run.world_size == 1:
        # DDP on one device would put one of its own in place of our order
        compat.keep_samplers(trainer)
    if run.should_stop():
        raise TrainingStopped("stopped before the first step")
    _accumulate(trainer, model, cfg.training.gradient_accumulation_steps, run)
    callback = RobustCallback(cfg, run)
    _prepare(data, callback)
    trainer.callbacks.append(callback)
    recover_in_steps(trainer, model, run, callback)
    path = run.resume_checkpoint
    if has_data:
        is_module = hasattr(data, "train_dataloader")
        options["datamodule" if is_module else "train_dataloaders"] = data
    if "weights_only" in compat.signature_as_written(fit).parameters:
        # the job's own file, whose hyperparameters may be modules and functions
        options.setdefault("weights_only", False)
    try:
        with warnings.catch_warnings():
            # Lightning cannot know that this loader continues where it was
            warnings.filterwarnings(
                "ignore", message="You're resuming from a checkpoint that ended"
            )
            if path is not None:
                options["ckpt_path"] = str(path)
                # it would search again; what it has found is in the checkpoint
                trainer.callbacks = [
                    callback
                    for callback in trainer.callbacks
                    if type(callback) is not _callbacks.LearningRateFinder
                ]
            fit(model, **options)
    except Stopped as stopped:
        raise TrainingStopped(str(stopped)) from None
    except SystemExit:
        # Lightning's answer to a KeyboardInterrupt and to SIGTERM
        if run.should_stop():
            raise TrainingStopped(f"stopped after step {trainer.global_step}") from None
        raise
    finally:
        live_of(run).saves.finish()
        callback.leave(trainer)


@contextlib.contextmanager
def adopted_fit(cfg: DictConfig, run: Run) -> Iterator[None]:
    """Replace the first ``trainer.fit`` of a program that was not written for us by `fit`."""
    fit_of_lightning = _pytorch.Trainer.fit

    @wraps(fit_of_lightning)
    def adopting(
        trainer: Any,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        **options: Any,
    ) -> None:
        options["val_dataloaders"] = val_dataloaders
        data = train_dataloaders if datamodule is None else datamodule
        reason = _counts_micro_batches(trainer)
        if live_of(run).is_steered:
            log.warning(
                "only one fit of a job resumes from its checkpoints; this fit is Lightning's own, "
                "and begins again in each attempt"
            )
            if trainer.accumulate_grad_batches == 1:
                steps = cfg.training.gradient_accumulation_steps
                _accumulate(trainer, model, steps, run)
        elif run.world_size == 1 and compat.starts_ranks_itself(trainer):
            reason = f"Trainer: starts {trainer.world_size} processes of its own"
        elif not compat.belongs_to_tuner(trainer):
            with Words(live_of(run).their_keys).of_errors():
                if reason is None:
                    fit = partial(fit_of_lightning, trainer)
                    _fit(fit, trainer, model, data, cfg=cfg, run=run, **options)
                    return
                _check_ranks(trainer, run)
        if reason is not None:
            log.warning("%s; this fit is Lightning's own, without checkpoints of ours", reason)
            keep_batch(run, reason)
        options |= {"train_dataloaders": train_dataloaders, "datamodule": datamodule}
        fit_of_lightning(trainer, model, **options)

    _pytorch.Trainer.fit = adopting
    try:
        yield
    finally:
        _pytorch.Trainer.fit = fit_of_lightning


def _with_batch_of(data: Any, cfg: DictConfig, run: Run) -> DictConfig:
    """Return the config with the data module's own batch size for the job's if that is not set.

    Raises:
        UserError: both are set, and differ.
    """
    theirs = getattr(data, "batch_size", None)
    if theirs is None:
        theirs = (getattr(data, "hparams", None) or {}).get("batch_size")
    if not hasattr(data, "train_dataloader") or type(theirs) is not int:
        return cfg
    steps = cfg.training.gradient_accumulation_steps
    spec = live_of(run).parts.asked
    if spec is None:
        spec = AttemptSpec((), cfg.training.batch_size, steps)
    if theirs in (cfg.training.batch_size, spec.batch_size):
        return cfg
    name = type(data).__name__
    if _sets_batch(cfg, spec):
        raise UserError(
            f"{name}.batch_size={theirs}, but training.batch_size={spec.batch_size}: one has to "
            "follow the other; leave training.batch_size out, or write "
            "batch_size=${training.batch_size} in the config of the data module"
        )
    micro_batch = -(-theirs * spec.gradient_accumulation_steps // steps)
    log.info(
        "%s.batch_size=%d is the job's batch size, as no training.batch_size is given", name, theirs
    )
    live_of(run).parts.set_asked(spec.with_batch(theirs, None))
    live_of(run).parts.split_by(replace(live_of(run).parts.plan, batch_size=micro_batch))
    live_of(run).parts.stop_splitting()  # An earlier fit of this trainer may have split.
    if run.is_main:
        live_of(run).reports.send(BatchTaken(theirs, micro_batch, steps))
    cfg = cfg.copy()
    with open_dict(cfg):
        cfg.training.batch_size = micro_batch
    return cfg


def _sets_batch(cfg: DictConfig, spec: AttemptSpec) -> bool:
    """Return whether the user has set the batch size. A default given explicitly counts too."""
    if (
        spec.batch_size != TrainingConfig.batch_size
        or cfg.training.get("effective_batch_size") is not None
    ):
        return True
    overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    return any(override.lstrip("+").startswith("training.batch_size=") for override in overrides)


def _check_ranks(trainer: Any, run: Run) -> None:
    if not isinstance(trainer, _pytorch.Trainer):
        raise UserError(
            f"Trainer: is {type(trainer).__module__.partition('.')[0]}'s, but {_pytorch.__name__} "
            "was imported first: use one of the two, which are the same library"
        )
    if trainer.world_size != run.world_size:
        raise UserError(
            f"Trainer: uses {trainer.world_size} devices, but this attempt has {run.world_size}: "
            "Trainer(**trainer_arguments(cfg, run)), and num_gpus=… for more"
        )


def _counts_micro_batches(trainer: Any) -> str | None:
    """Return why a limit of the trainer depends on the attempt, None if none does."""
    limit = trainer.limit_train_batches
    if limit == 1.0 or trainer.fast_dev_run:
        return None
    name = "overfit_batches" if trainer.overfit_batches else "limit_train_batches"
    return (
        f"Trainer: {name}={limit} counts micro-batches, which become smaller when memory runs out"
    )


def _check(trainer: Any, cfg: DictConfig, run: Run) -> None:
    accumulation = cfg.training.gradient_accumulation_steps
    _check_ranks(trainer, run)
    if trainer.accumulate_grad_batches not in (1, accumulation) or any(
        isinstance(callback, _callbacks.GradientAccumulationScheduler)
        for callback in trainer.callbacks
    ):
        raise UserError(
            "Trainer: has an accumulation of its own; leave accumulate_grad_batches out and set "
            "training.gradient_accumulation_steps"
        )
    reason = _counts_micro_batches(trainer)
    if reason is not None:
        raise UserError(f"{reason}; shorten the data set instead (torch.utils.data.Subset)")
    if isinstance(trainer.val_check_interval, int):
        log.warning(
            "val_check_interval=%d counts micro-batches: validation comes more often when they "
            "become smaller; a fraction of the epoch does not change",
            trainer.val_check_interval,
        )


def _accumulate(trainer: Any, model: Any, micro_batches: int, run: Run) -> None:
    """Set the accumulation of the trainer, or of a model with manual optimization."""
    if model.automatic_optimization:
        trainer.accumulate_grad_batches = micro_batches
    elif not _give(model, _ACCUMULATION, micro_batches):
        name = type(model).__name__
        hint = f"{name} has no attribute or hyperparameter {_ACCUMULATION}, which fit would set"
        keep_batch(run, hint)
        if micro_batches != 1:
            raise UserError(
                f"training.gradient_accumulation_steps={micro_batches}: Lightning accumulates "
                f"nothing where automatic_optimization=False; {hint}"
            )


def _prepare(data: Any, callback: RobustCallback) -> None:
    """Let the callback order every loader of training samples, made with its batch size."""
    if not hasattr(data, "train_dataloader"):
        callback.own_loader(data, "train_dataloaders")
        return
    # where Lightning's own batch size finder sets it
    _give(data, "batch_size", callback.shares.micro_batch)
    made = data.train_dataloader

    @wraps(made)
    def train_dataloader() -> Any:
        return callback.own_loader(made(), f"{type(data).__name__}.train_dataloader")

    data.train_dataloader = train_dataloader


def _give(owner: Any, name: str, value: int) -> bool:
    """Set an attribute or hyperparameter, and return whether it exists."""
    is_attribute = hasattr(owner, name)
    is_hyperparameter = name in getattr(owner, "hparams", {})
    if is_attribute:
        setattr(owner, name, value)
    if is_hyperparameter:
        owner.hparams[name] = value
    return is_attribute or is_hyperparameter


def _result(trainer: Any, model: Any, data: Any, metric: str | None, validation: Any) -> Any:
    figures = logged(trainer)
    source = type(model if data is None else data)
    inherited = _pytorch.LightningDataModule.val_dataloader
    can_validate = validation is not None or (
        getattr(source, "val_dataloader", inherited) is not inherited
    )
    is_there = bool(figures) if metric is None else metric in figures
    if not is_there and trainer.enable_validation and can_validate:
        # an attempt that resumes after the last step trains and logs nothing
        trainer.validate(
            model, validation, datamodule=data if validation is None else None, verbose=False
        )
        figures |= logged(trainer)
    return result_of(metric, figures)
