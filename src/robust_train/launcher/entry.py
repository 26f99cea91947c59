"""The one way into a job, for ``launch()`` and for commands: a launcher, or a rank of an engine.

Apart from :mod:`.job`, because what a guest does is made of that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from robust_train.config.composition import complete
from robust_train.config.trainers import end_import_at_launch
from robust_train.folder.state import Summary
from robust_train.host.engine import guest_rank
from robust_train.host.job_logging import logged_to_screen
from robust_train.launcher.job import Job, Trainer
from robust_train.model.errors import ConfigError, JobInterrupted


def launch(
    trainer: Trainer | None,
    cfg: Mapping[str, Any] | DictConfig | None = None,
    *,
    run_dir: str | Path | None = None,
) -> Summary:
    """Run ``trainer`` robustly: pick and wait for a GPU, and recover when memory runs out.

    Args:
        trainer: a callable, its dotted path, or None for ``cfg.trainer._target_``.
        cfg: any part of the keys of ``configs/robust.yaml``, and whatever the trainer needs.
        run_dir: the run folder; by default Hydra's for the job, or a new one under ``outputs/``.

    Returns:
        The summary of a completed job; ``summary.result`` is what the trainer returned.

    Raises:
        ConfigError: config, trainer or run folder cannot be used; NoProgress: see there.
        NoDevice: no device in time, and the CPU is not allowed.
        AttemptsExhausted: memory ran out on every device that may be used.
        TrainerFailed: the trainer failed otherwise; or its own exception.
        JobInterrupted: Ctrl-C or SIGTERM.
    """
    end_import_at_launch(trainer)
    with logged_to_screen():
        try:
            summary = run_job(trainer, complete(cfg or {}), run_dir)
        except (ConfigError, JobInterrupted) as error:
            raise error.with_traceback(
                None
            ) from error.__cause__  # without our own frames
    summary.raise_unless_completed()
    return summary


def run_job(
    trainer: Trainer | None,
    cfg: DictConfig,
    run_dir: str | Path | None = None,
    *,
    remedies: bool = True,
    explain: Callable[[Summary], object] = lambda summary: None,
) -> Summary:
    """Run a job, as a launcher or as one rank of an engine's job; for the arguments see `Job`."""
    if remedies and (guest := guest_rank(os.environ)) is not None:
        from robust_train.launcher.guest import run_as_guest

        return run_as_guest(guest, trainer, cfg, run_dir, explain=explain)
    return Job(trainer, cfg, run_dir, remedies=remedies, explain=explain).run()
