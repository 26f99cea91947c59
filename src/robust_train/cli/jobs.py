"""The task functions that Hydra calls for one job, in the launcher's process.

`robust_job` is that of ``train_robust.py``, `plain_job` that of ``train.py``, and `project_job`
that of a project's ``main.py``. Hydra calls them once, or in a sweep once per job.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from robust_train.config.checks import unchecked
from robust_train.config.composition import complete, plain_config
from robust_train.config.projects import builds_on_ours, with_group
from robust_train.config.trainers import TrainerRef
from robust_train.entry import run_job
from robust_train.folder.hydra_state import changes_each_time, remove_refused, sweep_folder
from robust_train.folder.requests import sweep_stop_requested
from robust_train.folder.state import EXIT_CODES, Summary
from robust_train.host.loggers import standard_error
from robust_train.model.errors import (
    EXIT_FAILED,
    ConfigError,
    JobInterrupted,
    TrainerFailedError,
    UserError,
)
from robust_train.report.narration import print_failure
from robust_train.sweep.record import Status
from robust_train.sweep.session import session


def robust_job(cfg: DictConfig) -> Any:
    """Run a job under the launcher. Returns the objective, NaN for a failed job of a sweep."""
    return _run(cfg, remedies=True)


def plain_job(cfg: DictConfig) -> Any:
    """Run an attempt of the trainer in this process, on the device that the config names."""
    return _run(plain_config(cfg), remedies=False)


def project_job(task: Callable[..., Any], trainer: Callable[..., Any], cfg: DictConfig) -> Any:
    """Run a job of a Hydra project. Its ``main`` calls ``launch`` if the config builds on
    ``robust``. Otherwise ``main`` is the trainer."""
    # A job of a resumed sweep may have ended in an earlier launch. `_run` then returns its result.
    is_over = session.job is not None and not session.job.is_running
    if builds_on_ours(cfg) and not is_over:
        try:
            return task(cfg)
        except Exception as error:
            # In a sweep, the job counts as failed.
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                raise
            # Printed here, because Hydra surrounds the error of a job with its own lines.
            code = print_with_exit_code(error)
            if code is None:
                raise
            session.add_exit_code(code)
            return None
    return _run(with_group(cfg), remedies=True, trainer=trainer)


def check_before_sweep(cfg: DictConfig) -> None:
    """Check the trainer and the data folder of a sweep's job, before any job starts.

    Raises:
        ConfigError: the trainer or the data folder does not exist.
    """
    config = unchecked(cfg)
    if config.target is None:
        # The job itself reports a missing target.
        return
    TrainerRef.of(config.target)
    root = config.data_folder
    if root and not os.path.isdir(os.path.expanduser(root)):
        raise ConfigError(f"dataset.root={root}: no such folder")


def _run(cfg: DictConfig, *, remedies: bool, trainer: Callable[..., Any] | None = None) -> Any:
    """Run a job, alone or in a sweep. A sweep continues if the job does not complete."""
    job = session.job
    try:
        if job is not None and job.status == Status.REFUSED:
            raise ConfigError(job.reason)
        if job is not None and not job.is_running:
            return job.objective
        if trainer is not None:
            cfg = complete(cfg)
        summary = run_job(trainer, cfg, remedies=remedies, explain=print_failure)
        if summary.status == "completed":
            return summary.objective
        session.end_job(summary.status, exit_code_of(summary), summary.reason)
    except ConfigError as error:
        # Printed here, because Hydra surrounds the error of a job with its own lines.
        session.refuse(error)
        session.end_job(Status.REFUSED, error.exit_code, str(error))
        hydra = HydraConfig.get()
        if hydra.mode == RunMode.RUN and changes_each_time():
            remove_refused(Path(hydra.runtime.output_dir))
    except JobInterrupted as error:
        session.end_job(Status.INTERRUPTED, error.exit_code, str(error) or "interrupted")
        folder = sweep_folder()
        if folder is None or not sweep_stop_requested(folder):
            raise
        # Hydra now calls the sweep's other jobs too, and each ends at once.
    return math.nan if HydraConfig.get().mode == RunMode.MULTIRUN else None


def print_with_exit_code(error: BaseException) -> int | None:
    """Print an error that ``launch`` raised in a project's ``main``, and return its exit code.
    Print nothing and return None for the project's own errors."""
    if isinstance(error, JobInterrupted):
        return error.exit_code
    # A TrainerFailedError has the trainer's own traceback, without the launcher's frames.
    shown = error.__cause__ if isinstance(error.__cause__, TrainerFailedError) else error
    code: int | None = getattr(shown, "exit_code", None)
    if code is not None:
        text = error if isinstance(error, UserError) else shown
        print(str(text).rstrip(), file=standard_error())
    return code


def exit_code_of(summary: Summary) -> int:
    """Return the exit code of a job that was not interrupted."""
    return EXIT_CODES.get(summary.status, EXIT_FAILED)
