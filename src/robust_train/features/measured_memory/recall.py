"""Finds the peak of earlier runs of the same job, before the job starts.

:func:`.plan.plan_job` in the launcher calls `with_known_need`. Jobs are the same if their
fingerprints are.
"""

from __future__ import annotations

import importlib.metadata
import logging
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

from omegaconf import OmegaConf

from robust_train.config.projects import GROUP
from robust_train.config.schema import RobustConfig
from robust_train.features.measured_memory.model import (
    MOST_TOGETHER,
    fingerprint,
    peak_at,
    program_of,
    with_margin,
    words_that_matter,
)
from robust_train.features.measured_memory.store import Need, read_needs
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.visible import visible_gpus
from robust_train.launcher.plan import Plan
from robust_train.readable import MIB, mib

log = logging.getLogger("robust_train")

_OF_TRAINING = ("num_workers", "prefetch_factor", "gradient_checkpointing")


def with_known_need(plan: Plan) -> Plan:
    """Return the plan of a job whose memory is measured with what it needs, if known."""
    config = plan.config
    if not config.measures_memory or config.device == "cpu":
        return plan
    need = read_needs().get(fingerprint_of(plan), Need())
    peak = None
    if not config.finds_batch_size:
        peak = peak_at(need.on(_models_for(need, plan)), config.training.batch_size)
    if not peak and config.runs_inline:
        log.warning(
            "min_gpu_memory_mb=auto: isolation=none trains in the launcher's process, which is not "
            "measured, so %d MiB stay reserved",
            config.min_gpu_memory_mb,
        )
        return plan
    if not peak:
        log.info(
            "min_gpu_memory_mb=auto: not measured yet, so %d MiB are reserved until it is",
            config.min_gpu_memory_mb,
        )
        return plan
    reserved_mb = math.ceil(with_margin(peak) / MIB)
    log.info(
        "min_gpu_memory_mb=auto: %d MiB, because earlier runs of this job held %s at their peak",
        reserved_mb,
        mib(peak),
    )
    most = MOST_TOGETHER if config.packs_gpus else config.gpu_jobs_per_device
    config = replace(config, min_gpu_memory_mb=reserved_mb, gpu_jobs_per_device=most)
    return replace(plan, config=config, policy=replace(plan.policy, config=config))


def _models_for(need: Need, plan: Plan) -> Collection[str]:
    """Return the models of the GPUs that a job may get. NVML is asked only if they matter."""
    if len(need.peaks) < 2:
        return ()
    visible = visible_gpus(read_inventory(processes=False), plan.environ)
    return {gpu.name for gpu in visible.gpus}


def fingerprint_of(plan: Plan) -> str:
    """Return a digest that all jobs which need the same memory share."""
    if plan.config.trainer.argv is not None:
        return fingerprint_of_program(plan.config)
    content = OmegaConf.to_container(plan.resolved_cfg, resolve=False)
    ref = plan.trainer_ref
    script = "" if ref.main is None else str(ref.main)
    return fingerprint(f"{ref.path} {script}", _keys_of(plan.config, content), versions())


def fingerprint_of_program(config: RobustConfig) -> str:
    """Return what `fingerprint_of` returns, for a job that runs a program."""
    folder = config.trainer.cwd
    if folder is None:
        folder = os.getcwd()
    argv = program_of(words_that_matter(config.trainer.argv or ()), folder)
    return fingerprint(" ".join(argv), _keys_of(config, {}), versions())


def versions() -> tuple[str, ...]:
    """Return the versions on which memory depends, without importing anything."""
    try:
        return (importlib.metadata.version("torch"),)
    except importlib.metadata.PackageNotFoundError:
        return ()


def _keys_of(config: RobustConfig, content: Any) -> Mapping[str, Any]:
    """Return the keys that may change memory: a project's own, and a few of ours."""
    ours = {name for name, field in RobustConfig.__dataclass_fields__.items() if field.metadata}
    named = {"model", "dataset"}
    theirs = {
        key: value
        for key, value in dict(content).items()
        if key in named or key not in ours | {GROUP, "hydra", "trainer"}
    }
    training = asdict(config.training)
    return {
        "project": theirs,
        "num_gpus": config.num_gpus,
        "training": {name: training[name] for name in _OF_TRAINING},
        "memory": {
            "fraction": config.memory.fraction,
            "expandable_segments": config.chosen("expandable_segments"),
        },
    }
