"""How many jobs of a sweep run at once."""

from __future__ import annotations

import os
from collections.abc import Callable

from omegaconf import DictConfig, OmegaConf


def jobs_at_once(
    n_jobs: int | None,
    *,
    jobs: int,
    gpus: int,
    jobs_per_gpu: int = 1,
    gpus_per_job: int = 1,
    cpus: int = 1,
) -> int:
    """How many of a sweep's jobs run side by side.

    Without ``n_jobs`` as many as there are places for on GPUs: more would only stand in line behind
    their own siblings, each with torch in memory and its ``gpu_wait_timeout_minutes`` running.
    Without GPUs it is half the CPU cores, because a job on the CPU uses several.

    Args:
        n_jobs: ``hydra.launcher.n_jobs``; None to choose.
        jobs: how many the sweep has.
        gpus: GPUs that a job may take.
        jobs_per_gpu: ``gpu_jobs_per_device``.
        gpus_per_job: ``num_gpus``.
        cpus: cores that this process may use.
    """
    wished = n_jobs or (gpus * jobs_per_gpu // gpus_per_job if gpus else cpus // 2)
    return max(1, min(wished, jobs))


def count_gpus(config: DictConfig) -> int:
    """The GPUs that a job of this config may take."""
    device = str(OmegaConf.select(config, "device", default="auto"))
    if not OmegaConf.select(config, "auto_device", default=True):
        if device == "cpu":
            return 0
        if device not in ("auto", "cuda"):
            return min(1, _in_a_child(_visible))
    return _in_a_child(_visible)


def count_cpus() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _visible() -> int:
    from robust_train.gpu.inventory import read_inventory
    from robust_train.gpu.visible import visible_gpus

    return len(visible_gpus(read_inventory(processes=False), os.environ).gpus)


def _in_a_child(count: Callable[[], int]) -> int:
    """``count()`` in a process of its own: NVML's state must not be inherited by the jobs."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write_end, str(count()).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return int(text or 0)
