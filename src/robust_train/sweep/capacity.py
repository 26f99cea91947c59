"""How many jobs of a sweep run at once."""

from __future__ import annotations

import json
import os
import sys

from omegaconf import DictConfig, OmegaConf

from robust_train.gpu.bounded import NoAnswer, run_command
from robust_train.readable import log


def jobs_at_once(
    n_jobs: int | None,
    *,
    jobs: int,
    gpus: int,
    jobs_per_gpu: int = 1,
    gpus_per_job: int = 1,
    cpus: int = 1,
) -> int:
    """Return how many of a sweep's ``jobs`` run side by side.

    Without ``n_jobs`` as many as fit on the GPUs: more would only wait behind their own siblings
    while their ``gpu_wait_timeout_minutes`` run. Without GPUs half the CPU cores, because a job on
    the CPU uses several.
    """
    wanted = n_jobs or (gpus * jobs_per_gpu // gpus_per_job if gpus else cpus // 2)
    return max(1, min(wanted, jobs))


def count_gpus(config: DictConfig, limit_seconds: float = 30.0) -> int:
    """Return the number of GPUs that a job of this config may take; 0 if the driver hangs."""
    device = str(OmegaConf.select(config, "device", default="auto"))
    if OmegaConf.select(config, "auto_device", default=True) or device in ("auto", "cuda"):
        return _visible_gpus(limit_seconds)
    return 0 if device == "cpu" else min(1, _visible_gpus(limit_seconds))


def count_cpus() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _visible_gpus(limit_seconds: float) -> int:
    """Count in a process of its own: the jobs, which are forks, must not inherit NVML's state."""
    command = [sys.executable, "-m", "robust_train.cli.main", "gpus", "--json"]
    try:
        listed = json.loads(run_command(command, limit_seconds).stdout)["gpus"]
    except NoAnswer:
        log.warning(
            "the NVIDIA driver has not answered for %.0f s and may be wedged: this sweep does not "
            "count its GPUs; hydra.launcher.n_jobs chooses how many jobs run at once",
            limit_seconds,
        )
        return 0
    return sum(gpu["visible"] for gpu in listed)
