"""Starts a job: :func:`launch` is called by programs, :func:`run_job` by commands.

Both plan the job and run it in the calling process, which becomes the launcher.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from robust_train.assembly import FEATURES, load_remedies
from robust_train.children import detach
from robust_train.config.composition import complete
from robust_train.config.main_guard import describe_lost_effects
from robust_train.config.projects import their_keys
from robust_train.config.schema import RobustConfig
from robust_train.config.trainers import Trainer, end_import_at_launch
from robust_train.config.words import Words
from robust_train.folder.hydra_state import chosen_folder, sweep_folder
from robust_train.folder.resume_command import resumed_overrides
from robust_train.folder.state import Summary, summary_of_earlier_launch
from robust_train.host.engine import guest_rank
from robust_train.host.job_logging import log_to_screen, shorten_lines
from robust_train.host.loggers import change_words, showing_lines
from robust_train.host.signals import end_without_traceback_if_uncaught, is_at_prompt
from robust_train.launcher.driver import make_driver
from robust_train.launcher.job import Job
from robust_train.launcher.plan import Plan, plan_job
from robust_train.model.errors import ConfigError
from robust_train.report.narration import print_failure, show_end

log = logging.getLogger("robust_train")

_RUN_DIR_IN_CONFIG = (
    "run_dir in the config is the trainer's own key; the run folder is an argument of its own: "
    "launch(…, run_dir=…)"
)


def launch(
    trainer: Trainer | None,
    cfg: Mapping[str, Any] | DictConfig | None = None,
    *,
    run_dir: str | Path | None = None,
) -> Summary:
    """Run ``trainer`` robustly: choose a GPU, wait for it, and recover when memory runs out.

    Args:
        trainer: a callable, its dotted path, or None for ``cfg.trainer._target_``.
        cfg: any part of the keys of ``configs/robust.yaml``, and the trainer's keys.
        run_dir: the run folder. By default, it is Hydra's for the job, or a new folder under
            ``outputs/``.

    Returns:
        The summary of a completed job, with the trainer's result in ``summary.result``. If the
            sweep pruned the job, ``summary.status`` is ``pruned``, and there may be no result.

    Raises:
        ConfigError: the config, trainer or run folder cannot be used.
        NoProgressError: three launches in a row saved nothing.
        NoDeviceError: no device became free in time, and the CPU is not allowed.
        AttemptsExhaustedError: memory ran out on every device that may be used.
        TrainerFailedError: the trainer failed in another way. Its own exception is raised if
            possible.
        JobInterrupted: Ctrl-C or SIGTERM. If it is not caught, a script ends with its exit code.
    """
    end_import_at_launch(trainer)
    # Otherwise a prompt or the command of a Hydra project shows the failure.
    shows_failure = not is_at_prompt() and not HydraConfig.initialized()
    with log_to_screen():
        try:
            summary = summary_of_earlier_launch()
            if summary is None or run_dir is not None:
                whole = complete(add_resumed_values(cfg or {}, run_dir))
                if run_dir is None and "run_dir" in whole and not HydraConfig.initialized():
                    log.warning("%s", _RUN_DIR_IN_CONFIG)
                explain = print_failure if shows_failure else _explain_nothing
                summary = run_job(trainer, whole, run_dir, explain=explain)
        except (ConfigError, KeyboardInterrupt) as error:
            end_without_traceback_if_uncaught()
            # Raise the exception without this package's frames.
            raise error.with_traceback(None) from error.__cause__
    try:
        summary.raise_unless_completed()
    except Exception as error:
        if shows_failure:
            end_without_traceback_if_uncaught(error)
        raise
    return summary


def _explain_nothing(summary: Summary) -> None:
    """Print nothing, because the caller shows the exception."""


def add_resumed_values(
    cfg: Mapping[str, Any] | DictConfig, run_dir: str | Path | None
) -> Mapping[str, Any] | DictConfig:
    """Return the config with the values given by ``robust-train resume ID key=value``."""
    folder = chosen_folder(run_dir)
    overrides = [] if folder is None else resumed_overrides(folder)
    if not overrides:
        return cfg
    whole = OmegaConf.merge({}, cfg)
    assert isinstance(whole, DictConfig)
    with open_dict(whole):
        whole.merge_with_dotlist(overrides)
    return whole


def run_job(
    trainer: Trainer | None,
    cfg: DictConfig,
    run_dir: str | Path | None = None,
    *,
    remedies: bool = True,
    explain: Callable[[Summary], object] = _explain_nothing,
) -> Summary:
    """Run a job, as a launcher or as one rank of an engine's job.

    Args:
        trainer: as in :func:`launch`.
        cfg: the complete config.
        run_dir: as in :func:`launch`.
        remedies: whether another attempt may follow a failed attempt.
        explain: prints why a job failed. It gets the summary before the last lines are printed.

    Raises:
        ConfigError: config, trainer or run folder cannot be used.
        JobInterrupted: a signal stopped the job.
    """
    show = partial(show_end, explain)
    words = Words(their_keys(cfg))
    shorten_lines()
    # None ends the rewording for an earlier job in this process.
    change_words(words.for_log)
    with showing_lines(), words.rewording_errors():
        guest = guest_rank(os.environ) if remedies else None
        if guest is None:
            plan = plan_launch(trainer, cfg, run_dir)
            lost = describe_lost_effects(plan.trainer_ref)
            if lost is not None:
                log.warning("%s", lost)
            driver = make_driver(plan, has_remedies=remedies)
            return Job(plan, driver, show_end=show).run()
        from robust_train.launcher.guest import RankDriver

        rank = RankDriver(guest, trainer, cfg, run_dir, FEATURES, load_remedies())
        return rank.run_part(lambda: Job(rank.plan, rank, show_end=show).run(), explain)


def plan_launch(
    trainer: Trainer | None, cfg: DictConfig, run_dir: str | Path | None = None
) -> Plan:
    """Return the plan of a job that this process runs.

    Raises:
        ConfigError: config, trainer or run folder cannot be used.
    """
    return plan_job(
        trainer, cfg, run_dir, remedies=load_remedies(), features=FEATURES, refuse=_refuse_to_detach
    )


def _refuse_to_detach(config: RobustConfig) -> None:
    """Refuse a job with ``detach=true``, because only a command can move it to the background.

    Raises:
        ConfigError: the config has ``detach=true``.
    """
    if detach.must_detach(config) and sweep_folder() is None:
        raise ConfigError(
            "detach=true: only a command continues in the background, not a call of launch(); "
            "start the program with nohup, or use robust-train run --detach -- PROGRAM"
        )
