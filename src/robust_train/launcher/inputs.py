"""What a job's policy and attempts are given: the config, and what the machine adds to it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from robust_train.config.attempt import (
    AttemptRequest,
    for_attempt,
    trainer_config,
)
from robust_train.config.placeholders import placeholders_in
from robust_train.config.projects import ours
from robust_train.config.schema import RobustConfig
from robust_train.config.trainers import TrainerRef
from robust_train.folder.hydra_state import (
    hydra_config,
    owns_terminal,
)
from robust_train.folder.trackers import tracker_environment
from robust_train.gpu.visible import mask_for
from robust_train.host.allocator import (
    VARIABLE,
    allocator_settings,
    exported_expandable_segments,
    is_wsl,
    use_expandable_segments,
)
from robust_train.launcher.stall_watch import nccl_variables
from robust_train.model.attempt import Attempt
from robust_train.model.gpu import Group
from robust_train.model.spec import AttemptSpec
from robust_train.policy.sizes import PolicySettings
from robust_train.queue.devices import name_for_trainer


def values_used(cfg: DictConfig, config: RobustConfig) -> set[str]:
    """Return which values of an attempt the command of a script names: their placeholders, or the
    keys of its batch."""
    trainer = config.trainer
    words = " ".join((trainer.argv or ()) + trainer.resume_argv)
    written = str(OmegaConf.to_container(ours(cfg).trainer, resolve=False))
    keys = ("batch_size", "gradient_accumulation_steps")
    used = placeholders_in(words) | {
        key for key in keys if f"training.{key}}}" in written
    }
    # a script that divides the effective batch by the accumulation has the micro-batch
    if used >= {"effective_batch_size", "gradient_accumulation_steps"}:
        used.add("batch_size")
    if used >= {"effective_batch_size", "batch_size"}:
        used.add("gradient_accumulation_steps")
    return used


def policy_settings(
    config: RobustConfig,
    used: Collection[str],  # values of an attempt that reach its script
) -> PolicySettings:
    """Return what the decisions of a job depend on."""
    return PolicySettings.of(
        config,
        expandable_segments=use_expandable_segments(
            config.memory.expandable_segments,
            os.environ,
            is_script=config.is_script,
            gpus=config.num_gpus,
        ),
        may_use_expandable_segments=(
            exported_expandable_segments(os.environ) is None and not is_wsl()
        ),
        used=used,
    )


def request_for(
    attempt: Attempt,  # that begins
    cfg: DictConfig,
    config: RobustConfig,
    trainer: TrainerRef,
    run_dir: Path,
    asked: AttemptSpec,  # the split of the batch that the job was asked for
    *,
    # the identity under which trackers go on; empty: they do not
    job: str = "",
    # between two reports in the job so far, seconds
    longest_pause: float = 0.0,
    is_first: bool = True,  # of its launch
    # CUDA_VISIBLE_DEVICES has numbers of GPUs, not UUIDs
    numbers_gpus: bool = False,
) -> AttemptRequest:
    """Return the request for an attempt of a job with config ``cfg``."""
    spec, is_script = attempt.spec, config.is_script
    trackers: dict[str, str] = {}
    if job:
        trackers = tracker_environment(
            os.environ,
            run_dir,
            job,
            is_script=is_script,
        )
    environ = attempt_environment(
        os.environ,
        spec.gpus,
        expandable_segments=spec.expandable_segments,
        by_index=numbers_gpus,
    )
    if config.stall_timeout_seconds != 0 and len(spec.gpus) > 1:
        environ |= nccl_variables(
            environ,
            run_dir,
            attempt.number,
        )
    device = name_for_trainer(
        spec.gpus,
        os.environ,
        own_process=not config.runs_inline,
    )
    own_config = for_attempt(config, spec, device)
    resumed_from = attempt.resumed_from
    return AttemptRequest(
        trainer=trainer,
        cfg=trainer_config(cfg, own_config),
        hydra_cfg=hydra_config(),
        config=own_config,
        spec=spec,
        attempt=attempt.number,
        run_dir=run_dir,
        resume_checkpoint=Path(resumed_from) if resumed_from else None,
        environ={**environ, **trackers},
        of_first_rank=tuple(trackers),
        cwd=os.getcwd(),
        longest_pause=longest_pause,
        has_live_status=owns_terminal(config),
        asked=asked,
        is_first=is_first,
        start_method=multiprocessing.get_start_method(allow_none=True),
    )


def attempt_environment(
    environ: Mapping[str, str],  # the launcher's environment
    gpus: Group,  # the GPUs of the attempt, empty for the CPU
    *,
    # for the allocator; what the user has exported takes precedence
    expandable_segments: bool,
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
        VARIABLE: allocator_settings(
            environ, expandable_segments=expandable_segments
        ),
    }
