"""Reads the memory in use for the journal, including the part outside of torch's cache.

`memory_in_use` is called in the process that trains, at the end of an attempt and on request. It
never raises, because a missing figure must not end a job.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import psutil

from robust_train.gpu.inventory import read_inventory
from robust_train.host import memory as host
from robust_train.memory import cuda
from robust_train.memory.stats import describe_figures
from robust_train.model.gpu import GpuInfo


def memory_in_use(*, context: bool = True) -> dict[str, int]:
    """Return the bytes in use, for the journal. Never raises.

    With CUDA these are ``allocated``, ``reserved`` and ``max_allocated`` of the GPU on which this
    process holds the most memory, and the figure of `measure_outside_cache`. Without CUDA, or if
    CUDA raises an error after a device fault, they are ``resident`` and ``max_resident`` of the
    process.

    Args:
        context: include the figure of `measure_outside_cache`, which asks NVML.
    """
    torch = cuda.started_torch()
    if torch is not None:
        with contextlib.suppress(Exception):
            index = cuda.busiest_gpu(torch)
            figures = {
                "allocated": torch.cuda.memory_allocated(index),
                "reserved": torch.cuda.memory_reserved(index),
                "max_allocated": torch.cuda.max_memory_allocated(index),
            }
            if context:
                with contextlib.suppress(Exception):
                    figures |= measure_outside_cache(torch, index)
            return figures
    with contextlib.suppress(OSError, psutil.Error):
        return {
            "resident": host.resident_bytes(psutil.Process())[0],
            "max_resident": host.read_largest_resident(),
        }
    return {}


def describe_memory(figures: Mapping[str, int]) -> str:
    """Return the figures of `memory_in_use` as a line for people."""
    if "allocated" in figures:
        allocated = figures["allocated"]
        peak = figures["max_allocated"]
        return describe_figures("GPU memory", allocated, peak, figures["reserved"])
    if figures:
        return describe_figures("cpu", figures["resident"], figures["max_resident"])
    return "memory in use is unknown"


def measure_outside_cache(torch: Any, index: int) -> dict[str, int]:
    """Return the bytes that this process holds on a GPU outside of torch's cache, by NVML.

    They are the CUDA context with its kernels, and the memory of cuBLAS, cuDNN and NCCL. The key is
    ``context_bytes``. If NVML does not list the process, for example in a container, the memory of
    other processes counts as well, and the key is ``context_at_most_bytes``.
    """
    gpu = _gpu_with_processes(cuda.gpu_uuid(torch, index))
    if gpu is None or gpu.unified_memory:
        return {}
    computing = [process for process in gpu.processes or () if process.computes]
    mine = [process for process in computing if process.pid == os.getpid()]
    # In a container this process has another pid. If a single process computes, it is this process.
    candidates = mine or computing
    name = "context_at_most_bytes"
    used = gpu.used_bytes
    if len(candidates) == 1 and candidates[0].used_bytes is not None:
        name = "context_bytes"
        used = candidates[0].used_bytes
    outside = used - torch.cuda.memory_reserved(index)
    return {name: outside} if outside > 0 else {}


def _gpu_with_processes(uuid: str) -> GpuInfo | None:
    for gpu in read_inventory(processes=True).gpus:
        if gpu.uuid == uuid:
            return gpu
    return None
