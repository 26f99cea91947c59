"""The request for an attempt, made of its spec and of the job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig

from robust_train.config.attempt import AttemptRequest, for_attempt, trainer_config
from robust_train.config.schema import RobustConfig
from robust_train.config.trainers import TrainerRef
from robust_train.folder.trackers import tracker_environment
from robust_train.gpu.visible import mask_for
from robust_train.launcher.hydra_state import hydra_config
from robust_train.launcher.stall_watch import nccl_variables
from robust_train.memory.cuda import VARIABLE, allocator_settings
from robust_train.model.gpu import Group
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
        environ |= nccl_variables(environ, run_dir, number)
    config = for_attempt(config, spec, device)
    return AttemptRequest(
        trainer=trainer,
        cfg=trainer_config(cfg, config),
        hydra_cfg=hydra_config(),
        config=config,
        spec=spec,
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


def attempt_environment(
    environ: Mapping[str, str],  # the launcher's environment
    gpus: Group,  # the GPUs of the attempt, empty for the CPU
    *,
    expandable_segments: bool,  # for the allocator; what the user has exported takes precedence
    # number the GPUs, for programs that read integers; UUIDs otherwise, and where NVML and CUDA may
    # count differently
    by_index: bool = False,
) -> dict[str, str]:
    """Return the launcher's environment, with these GPUs (or none) visible."""
    return {
        **environ,
        "CUDA_VISIBLE_DEVICES": mask_for(gpus, by_index=by_index),
        # so that a program that prints or parses indices agrees with nvidia-smi
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        VARIABLE: allocator_settings(environ, expandable_segments=expandable_segments),
    }
