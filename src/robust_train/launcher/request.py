"""The request for an attempt, made of its spec and of the job."""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig

from robust_train.config.attempt import for_attempt, trainer_config
from robust_train.config.request import AttemptRequest
from robust_train.config.schema import RobustConfig
from robust_train.config.trainer_ref import TrainerRef
from robust_train.folder.trackers import tracker_environment
from robust_train.launcher import flight_recorder
from robust_train.launcher.environment import attempt_environment
from robust_train.launcher.hydra_state import hydra_config
from robust_train.model.spec import AttemptSpec


def request_for(
    spec: AttemptSpec,  # what the attempt uses
    cfg: DictConfig,
    config: RobustConfig,
    *,
    trainer: TrainerRef,
    device: str,  # what `cfg.device` is for the trainer
    number: int,  # of the attempt
    run_dir: Path,
    job: str,  # its identity
    checkpoint: Path | None,  # what it resumes from
    search_key: str,  # names what memory depends on
    longest_pause: float,  # between two reports in the job so far, seconds
    has_live_status: bool,  # the launcher shows steps and loss on a terminal
) -> AttemptRequest:
    """Return the request for an attempt of a job with config ``cfg``."""
    trackers = tracker_environment(os.environ, run_dir, job, is_script=config.is_script)
    environ = attempt_environment(
        os.environ,
        spec.gpus,
        expandable_segments=spec.expandable_segments,
        by_index=config.gpus_by_index,
    )
    if config.stall_timeout_seconds != 0 and len(spec.gpus) > 1:
        environ |= flight_recorder.settings(environ, run_dir, number)
    config = for_attempt(config, spec, device)
    return AttemptRequest(
        trainer=trainer,
        cfg=trainer_config(cfg, config),
        hydra_cfg=hydra_config(),
        config=config,
        spec=spec,
        job=job,
        attempt=number,
        run_dir=run_dir,
        resume_checkpoint=checkpoint,
        environ={**environ, **trackers},
        of_first_rank=tuple(trackers),
        cwd=os.getcwd(),
        longest_pause=longest_pause,
        search_key=search_key,
        has_live_status=has_live_status,
    )
