"""How many jobs of a sweep run at once."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal

import psutil
from omegaconf import DictConfig, OmegaConf

log = logging.getLogger("robust_train")

_REAP_SECONDS = 2.0


def jobs_at_once(
    n_jobs: int | None,
    *,
    jobs: int,
    gpus: int,
    jobs_per_gpu: int = 1,
    gpus_per_job: int = 1,
    cpus: int = 1,
) -> int:
    """Return how many of a sweep's jobs run side by side.

    Without ``n_jobs`` as many as fit on the GPUs: more would only wait in the queue behind their
    own siblings while their ``gpu_wait_timeout_minutes`` run. Without GPUs half the CPU cores,
    because a job on the CPU uses several.

    Args:
        n_jobs: ``hydra.launcher.n_jobs``; None to choose.
        jobs: number of jobs in the sweep.
        gpus: GPUs that a job may take.
        jobs_per_gpu: ``gpu_jobs_per_device``.
        gpus_per_job: ``num_gpus``.
        cpus: cores that this process may use.
    """
    wanted = n_jobs or (gpus * jobs_per_gpu // gpus_per_job if gpus else cpus // 2)
    return max(1, min(wanted, jobs))


def count_gpus(config: DictConfig, limit_seconds: float = 30.0) -> int:
    """Return the number of GPUs that a job of this config may take; 0 if the driver hangs."""
    device = str(OmegaConf.select(config, "device", default="auto"))
    if OmegaConf.select(config, "auto_device", default=True) or device in ("auto", "cuda"):
        return _count_in_a_child(limit_seconds)
    return 0 if device == "cpu" else min(1, _count_in_a_child(limit_seconds))


def count_cpus() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _count_in_a_child(limit_seconds: float) -> int:
    """Count in a process of its own: jobs must not inherit NVML's state.

    A child that hangs in the driver cannot even be killed, so it is left behind.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write_end, str(_visible()).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    text = b""
    with os.fdopen(read_end, "rb") as answer:
        if select.select([answer], [], [], limit_seconds)[0]:
            text = answer.read()
        else:
            log.warning(
                "the NVIDIA driver has not answered for %.0f s and may be wedged: this sweep does "
                "not count its GPUs; hydra.launcher.n_jobs chooses how many jobs run at once",
                limit_seconds,
            )
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(psutil.Error):  # it hangs: its end is not worth waiting for
        psutil.Process(pid).wait(_REAP_SECONDS)
    return int(text or 0)


def _visible() -> int:
    from robust_train.gpu.inventory import read_inventory
    from robust_train.gpu.visible import visible_gpus

    return len(visible_gpus(read_inventory(processes=False), os.environ).gpus)
