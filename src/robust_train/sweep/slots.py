"""Chooses how many jobs of a sweep run side by side.

`GpuQueue` calls `choose_slots` in the sweep's process before the first job starts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping

from robust_train.config.schema import RobustConfig
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.visible import visible_gpus
from robust_train.sweep.packing import GpuMemory

log = logging.getLogger("robust_train")


def choose_slots(
    settings: RobustConfig, n_jobs: int | None, jobs: int, *, gpus: int, cpus: int
) -> int:
    """Return how many of a sweep's ``jobs`` run side by side.

    Without ``n_jobs``, as many jobs run as fit on the GPUs. More jobs would only wait for each
    other, and use up their ``gpu_wait_timeout_minutes``. Without GPUs, the number is half the
    number of CPU cores, because a job on the CPU uses several cores.
    """
    if not n_jobs:
        n_jobs = cpus // 2
        if gpus:
            n_jobs = gpus * settings.gpu_jobs_per_device // settings.num_gpus
    return max(1, min(n_jobs, jobs))


def read_gpu_memory(settings: RobustConfig) -> Mapping[str, GpuMemory]:
    """Return the memory of each GPU that the jobs may use, by the GPU's UUID.

    The result is empty if the NVIDIA driver hangs. A fork reads the GPUs, because the jobs are
    forks of this process too and must not inherit NVML's state.
    """
    if settings.device == "cpu" and not settings.picks_gpu:
        return {}
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os.close(read_end)
            visible = visible_gpus(read_inventory(processes=False), os.environ)
            memory = None
            if visible.inventory.answered:
                memory = {gpu.uuid: (gpu.total_bytes, gpu.used_bytes) for gpu in visible.gpus}
            answer = json.dumps(memory)
            with open(write_end, "w") as pipe:
                pipe.write(answer)
        os._exit(0)
    os.close(write_end)
    with open(read_end) as pipe:
        answer = pipe.read() or "{}"
    memory = json.loads(answer)
    if memory is None:
        # The child hangs in the driver, so it must not be waited for.
        log.warning(
            "the NVIDIA driver has not answered and may be wedged: this sweep does not count its "
            "GPUs; hydra.launcher.n_jobs chooses how many jobs run at once"
        )
        return {}
    os.waitpid(child, 0)
    by_uuid = {str(uuid): GpuMemory(*sizes) for uuid, sizes in memory.items()}
    if settings.picks_gpu or settings.device in ("auto", "cuda"):
        return by_uuid
    # All jobs use the same GPU, which the user named.
    return dict(list(by_uuid.items())[:1])
