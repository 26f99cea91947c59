"""How much memory this process has in use, for the journal. Never raises, and never starts CUDA."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import psutil

from robust_train.gpu.inventory import read_inventory
from robust_train.memory import host
from robust_train.memory.cuda import busiest_gpu, started_torch
from robust_train.values import GIB


def memory_in_use(*, context: bool = True) -> dict[str, int]:
    """Return bytes in use: of CUDA where this process has started it, else of the process.

    ``allocated``, ``reserved`` and ``max_allocated`` of the GPU that holds most, and what
    :func:`beside_cache` returns; or ``resident`` and ``max_resident``. After a fault of the device,
    where CUDA may refuse to answer, the process's.
    """
    torch = started_torch()
    if torch is not None:
        with contextlib.suppress(Exception):
            index = busiest_gpu(torch)
            figures = {
                "allocated": torch.cuda.memory_allocated(index),
                "reserved": torch.cuda.memory_reserved(index),
                "max_allocated": torch.cuda.max_memory_allocated(index),
            }
            return {**figures, **(beside_cache(torch, index) if context else {})}
    with contextlib.suppress(OSError, psutil.Error):
        return {"resident": host.resident_bytes()[0], "max_resident": host.largest_resident()}
    return {}


def beside_cache(torch: Any, index: int) -> dict[str, int]:
    """Return ``context_bytes``: what this process takes of a GPU beside torch's cache, by NVML.

    That is the CUDA context with its kernels, cuBLAS's, cuDNN's and NCCL's own memory. Where NVML
    does not list the process (a container), ``context_at_most_bytes``: others' memory counts too.
    """
    with contextlib.suppress(Exception):
        reserved = torch.cuda.memory_reserved(index)
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        gpus = read_inventory(processes=True).gpus
        for gpu in (gpu for gpu in gpus if gpu.uuid == uuid and not gpu.unified_memory):
            computing = [process for process in gpu.processes or () if process.computes]
            # in a container it may have another number, and is known only if it is alone
            own = [process for process in computing if process.pid == os.getpid()] or computing
            used = own[0].used_bytes if len(own) == 1 else None
            name = "context_at_most_bytes" if used is None else "context_bytes"
            size = gpu.used_bytes if used is None else used
            return {name: size - reserved} if size > reserved else {}
    return {}


def describe_memory(figures: Mapping[str, int]) -> str:
    """Return the figures of :func:`memory_in_use` as a line for people."""
    if "allocated" in figures:
        now, peak, label = figures["allocated"], figures["max_allocated"], "GPU Memory - Allocated"
    elif figures:
        now, peak, label = figures["resident"], figures["max_resident"], "Host Memory - Resident"
    else:
        return "memory in use is unknown"
    return f"{label}: {now / GIB:.2f} GB, Peak: {peak / GIB:.2f} GB"
