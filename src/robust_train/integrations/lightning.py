"""Runs a Lightning ``Trainer`` as an attempt: call `fit` instead of ``trainer.fit``.

A trainer function calls `fit` in the attempt's process, on every rank::

    def train(cfg, run):
        trainer = L.Trainer(**trainer_arguments(cfg, run), max_epochs=cfg.training.epochs)
        return fit(trainer, Net(cfg), Digits(cfg), cfg=cfg, run=run, metric="val_accuracy")

`adopt_fit` does the same for a program that calls ``trainer.fit`` directly.
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
from robust_train.integrations.lightning_callback import RobustCallback, Stopped, logged_figures
from robust_train.integrations.lightning_step import recover_in_steps
from robust_train.integrations.steering import count_machines, keep_batch, lightning, result_of
from robust_train.model.errors import TrainingStopped, UserError
from robust_train.model.events import BatchTaken
from robust_train.model.spec import AttemptSpec

_pytorch = lightning()
_callbacks = lightning(".callbacks")

log = logging.getLogger("robust_train.integrations")

_ACCUMULATION = "accumulate_grad_batches"

__all__ = ["fit", "trainer_arguments"]


def trainer_arguments(cfg: DictConfig, run: Run) -> dict[str, Any]:
    """Return the arguments that give a ``Trainer`` the attempt's devices and the run folder."""
    device = torch.device(cfg.device)
    is_on_gpu = device.type == "cuda"
    nodes = count_machines()
    arguments: dict[str, Any] = {
        "accelerator": "gpu" if is_on_gpu else "cpu",
        "devices": run.world_size // nodes,
        "default_root_dir": str(run.run_dir),
    }
    if run.world_size > 1:
        # `fit` itself divides the samples of every step among the ranks.
        arguments |= {"num_nodes": nodes, "strategy": "ddp", "use_distributed_sampler": False}
    elif is_on_gpu:
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
        model: the ``LightningModule``. With manual optimization and accumulation, it needs an
            attribute or hyperparameter ``accumulate_grad_batches``, which is set here.
        data: a ``LightningDataModule``, a ``DataLoader`` created with ``cfg.training.batch_size``,
            or None if the model has the loaders. A data module's ``batch_size`` (attribute or
            hyperparameter) is set here. Its own value becomes the job's batch size if
            ``training.batch_size`` is not given.
        cfg, run: the arguments of the trainer function.
        metric: the name of the logged value to return, or None for a dictionary of all of them.
        options: further arguments of ``trainer.fit``, such as ``val_dataloaders``.

    Raises:
        UserError: the trainer, model or data cannot keep the effective batch.
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
    """Run ``fit``, Lightning's original ``trainer.fit``, as an attempt."""
    if data is not None:
        is_module = hasattr(data, "train_dataloader")
        options["datamodule" if is_module else "train_dataloaders"] = data
    else:
        data = model
    cfg = _take_batch_of(data, cfg, run)
    _check(trainer, cfg, run)
    if run.world_size == 1:
        # With DDP on one device, Lightning would replace our sample order with its own sampler.
        compat.keep_samplers(trainer)
    if run.should_stop():
        raise TrainingStopped("stopped before the first step")
    _set_accumulation(trainer, model, cfg.training.gradient_accumulation_steps, run)
    callback = RobustCallback(cfg, run)
    _order_samples(data, callback)
    trainer.callbacks.append(callback)
    recover_in_steps(trainer, model, run, callback)
    if "weights_only" in compat.signature_as_written(fit).parameters:
        # The job wrote its checkpoints itself, so it trusts them. Their hyperparameters may be
        # modules and functions, which weights_only=True cannot load.
        options.setdefault("weights_only", False)
    if run.resume_checkpoint is not None:
        options["ckpt_path"] = str(run.resume_checkpoint)
        # The checkpoint has the learning rate that the finder found, so it must not search again.
        trainer.callbacks = [
            each for each in trainer.callbacks if type(each) is not _callbacks.LearningRateFinder
        ]
    try:
        with warnings.catch_warnings():
            # Lightning does not know that our loader can resume within an epoch.
            warnings.filterwarnings(
                "ignore", message="You're resuming from a checkpoint that ended"
            )
            fit(model, **options)
    except Stopped as stopped:
        raise TrainingStopped(str(stopped)) from None
    except SystemExit:
        # Lightning exits on a KeyboardInterrupt and on SIGTERM.
        if run.should_stop():
            raise TrainingStopped(f"stopped after step {trainer.global_step}") from None
        raise
    finally:
        live_of(run).saves.finish()
        callback.leave(trainer)


@contextlib.contextmanager
def adopt_fit(cfg: DictConfig, run: Run) -> Iterator[None]:
    """Replace ``Trainer.fit`` within the block, for a program that does not call `fit`.

    The program's first fit runs as an attempt, as if it called `fit`. Lightning's original method
    runs later fits, fits of a ``Tuner`` and fits that cannot resume.
    """
    fit_of_lightning = _pytorch.Trainer.fit

    @wraps(fit_of_lightning)
    def fit_or_adopt(
        trainer: Any,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        **options: Any,
    ) -> None:
        options["val_dataloaders"] = val_dataloaders
        reason = _counts_micro_batches(trainer)
        if live_of(run).is_steered:
            log.warning(
                "only one fit of a job resumes from its checkpoints; this fit is Lightning's own, "
                "and starts from the beginning in each attempt"
            )
            if trainer.accumulate_grad_batches == 1:
                steps = cfg.training.gradient_accumulation_steps
                _set_accumulation(trainer, model, steps, run)
        elif run.world_size == 1 and compat.starts_ranks_itself(trainer):
            reason = f"Trainer: starts {trainer.world_size} processes of its own"
        elif not compat.belongs_to_tuner(trainer):
            with Words(live_of(run).their_keys).rewording_errors():
                if reason is None:
                    data = train_dataloaders if datamodule is None else datamodule
                    fit = partial(fit_of_lightning, trainer)
                    _fit(fit, trainer, model, data, cfg=cfg, run=run, **options)
                    return
                _check_ranks(trainer, run)
        if reason is not None:
            log.warning("%s; this fit is Lightning's own, without checkpoints of ours", reason)
            keep_batch(run, reason)
        options |= {"train_dataloaders": train_dataloaders, "datamodule": datamodule}
        fit_of_lightning(trainer, model, **options)

    _pytorch.Trainer.fit = fit_or_adopt
    try:
        yield
    finally:
        _pytorch.Trainer.fit = fit_of_lightning


def _take_batch_of(data: Any, cfg: DictConfig, run: Run) -> DictConfig:
    """Use a data module's batch size for the job if the user set no ``training.batch_size``.

    Returns:
        The config, with the micro-batch size that follows from the data module's batch size.

    Raises:
        UserError: the user set both, and they differ.
    """
    batch_size = getattr(data, "batch_size", None)
    if batch_size is None:
        batch_size = (getattr(data, "hparams", None) or {}).get("batch_size")
    if not hasattr(data, "train_dataloader") or type(batch_size) is not int:
        return cfg
    steps = cfg.training.gradient_accumulation_steps
    parts = live_of(run).parts
    requested = parts.asked
    if requested is None:
        requested = AttemptSpec((), cfg.training.batch_size, steps)
    if batch_size in (cfg.training.batch_size, requested.batch_size):
        return cfg
    name = type(data).__name__
    if _is_batch_set(cfg, requested):
        raise UserError(
            f"{name}.batch_size={batch_size}, but training.batch_size={requested.batch_size}: only "
            "one of them can be the job's; leave training.batch_size out, or write "
            "batch_size=${training.batch_size} in the config of the data module"
        )
    # If earlier attempts split the batch, accumulation is higher than requested.
    micro_batch = -(-batch_size * requested.gradient_accumulation_steps // steps)
    log.info(
        "%s.batch_size=%d is the job's batch size, because no training.batch_size is given",
        name,
        batch_size,
    )
    parts.set_asked(requested.with_batch(batch_size, None))
    parts.split_by(replace(parts.plan, batch_size=micro_batch))
    parts.stop_splitting()  # An earlier fit of this trainer may have split.
    if run.is_main:
        live_of(run).reports.send(BatchTaken(batch_size, micro_batch, steps))
    cfg = cfg.copy()
    with open_dict(cfg):
        cfg.training.batch_size = micro_batch
    return cfg


def _is_batch_set(cfg: DictConfig, requested: AttemptSpec) -> bool:
    """Return whether the user set the batch size, even if only to its default value."""
    if requested.batch_size != TrainingConfig.batch_size:
        return True
    if cfg.training.get("effective_batch_size") is not None:
        return True
    if not HydraConfig.initialized():
        return False
    overrides = HydraConfig.get().overrides.task
    return any(override.lstrip("+").startswith("training.batch_size=") for override in overrides)


def _check_ranks(trainer: Any, run: Run) -> None:
    """Raise UserError unless the trainer uses exactly the attempt's ranks."""
    if not isinstance(trainer, _pytorch.Trainer):
        raise UserError(
            f"Trainer: comes from {type(trainer).__module__.partition('.')[0]}, but "
            f"{_pytorch.__name__} was imported first: import only one of the two, which are the "
            "same library"
        )
    if trainer.world_size != run.world_size:
        raise UserError(
            f"Trainer: uses {trainer.world_size} devices, but this attempt has {run.world_size}: "
            "create it with Trainer(**trainer_arguments(cfg, run)), and set num_gpus=… for more"
        )


def _counts_micro_batches(trainer: Any) -> str | None:
    """Return why the length of an epoch depends on the micro-batch size, or None if it does not."""
    limit = trainer.limit_train_batches
    if limit == 1.0 or trainer.fast_dev_run:
        return None
    name = "overfit_batches" if trainer.overfit_batches else "limit_train_batches"
    return (
        f"Trainer: {name}={limit} counts micro-batches, which become smaller when memory runs out"
    )


def _check(trainer: Any, cfg: DictConfig, run: Run) -> None:
    """Raise UserError if the trainer cannot keep the effective batch of every attempt."""
    _check_ranks(trainer, run)
    accumulation = cfg.training.gradient_accumulation_steps
    has_scheduler = any(
        isinstance(callback, _callbacks.GradientAccumulationScheduler)
        for callback in trainer.callbacks
    )
    if has_scheduler or trainer.accumulate_grad_batches not in (1, accumulation):
        raise UserError(
            "Trainer: sets its accumulation itself; leave accumulate_grad_batches out and set "
            "training.gradient_accumulation_steps"
        )
    reason = _counts_micro_batches(trainer)
    if reason is not None:
        raise UserError(f"{reason}; shorten the data set instead (torch.utils.data.Subset)")
    if isinstance(trainer.val_check_interval, int):
        log.warning(
            "val_check_interval=%d counts micro-batches: validation runs more often when they "
            "become smaller; a fraction of the epoch keeps its meaning",
            trainer.val_check_interval,
        )


def _set_accumulation(trainer: Any, model: Any, micro_batches: int, run: Run) -> None:
    """Set the accumulation of the trainer, or of the model if it optimizes manually."""
    if model.automatic_optimization:
        trainer.accumulate_grad_batches = micro_batches
    elif not _set_value(model, _ACCUMULATION, micro_batches):
        name = type(model).__name__
        hint = f"{name} has no attribute or hyperparameter {_ACCUMULATION}, which fit would set"
        keep_batch(run, hint)
        if micro_batches != 1:
            raise UserError(
                f"training.gradient_accumulation_steps={micro_batches}: Lightning accumulates "
                f"nothing if automatic_optimization=False; {hint}"
            )


def _order_samples(data: Any, callback: RobustCallback) -> None:
    """Give every training loader of ``data`` the callback's sample order and micro-batch size."""
    if not hasattr(data, "train_dataloader"):
        callback.order_samples(data, "train_dataloaders")
        return
    # Lightning's own batch size finder sets the batch size in the same places.
    _set_value(data, "batch_size", callback.shares.micro_batch)
    make_loader = data.train_dataloader

    @wraps(make_loader)
    def train_dataloader() -> Any:
        loader = make_loader()
        callback.order_samples(loader, f"{type(data).__name__}.train_dataloader")
        return loader

    data.train_dataloader = train_dataloader


def _set_value(owner: Any, name: str, value: int) -> bool:
    """Set an attribute, a hyperparameter or both, if they exist. Return whether either exists."""
    is_attribute = hasattr(owner, name)
    is_hyperparameter = name in getattr(owner, "hparams", {})
    if is_attribute:
        setattr(owner, name, value)
    if is_hyperparameter:
        owner.hparams[name] = value
    return is_attribute or is_hyperparameter


def _result(trainer: Any, model: Any, data: Any, metric: str | None, validation: Any) -> Any:
    """Return the logged value of ``metric``, or all logged values if ``metric`` is None.

    An attempt that resumes after the last step logs nothing, so this function validates the model.
    """
    figures = logged_figures(trainer)
    is_logged = bool(figures) if metric is None else metric in figures
    source = type(model if data is None else data)
    inherited = _pytorch.LightningDataModule.val_dataloader
    has_own_loader = getattr(source, "val_dataloader", inherited) is not inherited
    can_validate = validation is not None or has_own_loader
    if not is_logged and trainer.enable_validation and can_validate:
        data_module = data if validation is None else None
        trainer.validate(model, validation, datamodule=data_module, verbose=False)
        figures |= logged_figures(trainer)
    return result_of(metric, figures)
