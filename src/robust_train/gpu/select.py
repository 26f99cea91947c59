"""Chooses among GPUs, and explains why GPUs are unsuitable.

The launcher, the queue and commands call these functions. They are pure, except for
`find_best_device`, which a program calls that has no launcher.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from robust_train.gpu.cuda_order import order_in_this_process
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.processes import GpuUser
from robust_train.gpu.visible import VARIABLE, visible_gpus
from robust_train.model.gpu import GpuInfo, GpuProcess, Group
from robust_train.readable import GIB, MIB, mib

if TYPE_CHECKING:
    import torch

log = logging.getLogger("robust_train")

# A GPU without listed processes counts as used if it reaches this utilization or memory.
_BUSY_PERCENT = 10
_BUSY_BYTES = 2 * GIB


def rank(gpus: Sequence[GpuInfo], min_bytes: int) -> list[GpuInfo]:
    """Return the GPUs on which a job that needs ``min_bytes`` could start now, best first.

    The GPU with the most free memory comes first, then the least busy GPU (unknown last), then the
    lowest PCI address.
    """
    suitable = [gpu for gpu in gpus if gpu.unusable is None and gpu.free_bytes >= min_bytes]
    return sorted(suitable, key=lambda gpu: (-gpu.free_bytes, tie_breaker(gpu)))


def tie_breaker(gpu: GpuInfo) -> tuple[int, str, str]:
    """Return a sort key among equal GPUs: the least busy, then the lowest PCI address."""
    busy = gpu.utilization_percent
    return 101 if busy is None else busy, gpu.pci_bus_id, gpu.uuid


def choose_group(gpus: Sequence[GpuInfo], count: int) -> Group:
    """Return the best ``count`` of the GPUs, empty if there are too few.

    They are of the same model if possible, because a group is as slow as its slowest GPU.

    Args:
        gpus: the candidates, best first.
        count: the number of GPUs that the job needs.
    """
    alike: dict[tuple[str, int], list[GpuInfo]] = {}
    for gpu in gpus:
        group = alike.setdefault((gpu.name, gpu.total_bytes), [])
        group.append(gpu)
        if len(group) == count:
            return tuple(group)
    if len(gpus) < count:
        return ()
    return tuple(gpus[:count])


def can_be_one_of(gpu: GpuInfo, count: int) -> bool:
    """Return whether a job of ``count`` GPUs can use this GPU. CUDA shows a process only a single
    MIG slice."""
    return count == 1 or gpu.parent_uuid is None


def could_ever_fit(gpu: GpuInfo, min_bytes: int) -> bool:
    """Return whether a GPU is large enough, readable, and allows CUDA programs."""
    is_readable = gpu.total_bytes > 0
    return is_readable and gpu.total_bytes >= min_bytes and gpu.compute_mode != "prohibited"


def explain(gpus: Sequence[GpuInfo], min_bytes: int) -> str:
    """Return the required memory, and the reason why each GPU is unsuitable, in one line."""
    parts = []
    for gpu in gpus:
        why = gpu.unusable
        if not why:
            why = f"{mib(gpu.free_bytes)} of {mib(gpu.total_bytes)} free"
        parts.append(f"{label(gpu)}: {why}")
    return f"needs {mib(min_bytes)} free; {'; '.join(parts)}"


def label(gpu: GpuInfo) -> str:
    """Return a GPU's name in a sentence: ``GPU 0 (NVIDIA A100, GPU-ab12cd34…)``."""
    return f"GPU {gpu.index} ({gpu.name}, {gpu.uuid[:12]}…)"


def describe_process(process: GpuProcess, holders: Mapping[int, GpuUser]) -> str:
    """Return a process for a sentence: ``python (pid 812, ada) 14000 MiB``. Unknown parts are left
    out."""
    holder = holders.get(process.pid)
    who = f"pid {process.pid}"
    if holder is not None:
        who = f"{holder.command} ({who}, {holder.user})"
    return who if process.used_bytes is None else f"{who} {mib(process.used_bytes)}"


def others_on(gpu: GpuInfo, holders: Mapping[int, GpuUser], ours: Collection[int] = ()) -> str:
    """Describe the other processes that compute on a GPU, empty if there are none.

    In a container or under WSL, NVML may list no processes. Then used memory and utilization show
    that other processes exist.

    Args:
        gpu: a GPU that was read with its processes.
        holders: the names of processes, by process id.
        ours: the process ids of the job.
    """
    listed = gpu.processes or ()
    computing = [process for process in listed if process.computes and process.pid not in ours]
    if computing:
        return ", ".join(describe_process(process, holders) for process in computing)
    used = gpu.used_bytes
    busy = gpu.utilization_percent or 0
    is_used = used > _BUSY_BYTES and not gpu.unified_memory
    if gpu.processes or not (is_used or busy >= _BUSY_PERCENT):
        return ""
    return f"processes that are not listed ({mib(used)} in use, {busy}% busy)"


def idlest(gpus: Sequence[GpuInfo], ours: Collection[int] = ()) -> GpuInfo | None:
    """Return the best GPU on which no other process computes, None if there is none."""
    ranked = rank([gpu for gpu in gpus if not others_on(gpu, {}, ours)], 0)
    return ranked[0] if ranked else None


def find_best_device(min_memory_mb: int = 4000) -> torch.device:
    """Return the GPU with the most free memory as a device for this process, or the CPU.

    Only GPUs that CUDA_VISIBLE_DEVICES shows are considered. If the CPU is returned, a log line
    says why. The function does not wait, reserve a GPU, or start CUDA.

    If neither CUDA_VISIBLE_DEVICES nor CUDA_DEVICE_ORDER is set and CUDA has not started, the
    function sets CUDA_DEVICE_ORDER=PCI_BUS_ID in ``os.environ``. Otherwise the same number could
    mean another GPU when CUDA starts.

    Args:
        min_memory_mb: the required free memory, in MiB.

    Returns:
        ``cuda:0`` and so on, in this process's numbering, or ``cpu``.
    """
    import torch

    if torch.version.cuda is None:
        log.info("training on the CPU: this build of PyTorch has no CUDA")
        return torch.device("cpu")
    ordinals, why = _addressable_gpus()
    gpus = tuple(ordinals)
    min_bytes = min_memory_mb * MIB
    ranked = rank(gpus, min_bytes)
    if ranked:
        return torch.device("cuda", ordinals[ranked[0]])
    if gpus:
        why = f"no suitable GPU: {explain(gpus, min_bytes)}"
    log.info("training on the CPU: %s", why)
    return torch.device("cpu")


def _addressable_gpus() -> tuple[dict[GpuInfo, int], str]:
    """Return the GPUs with their CUDA ordinals in this process, and why there are none."""
    started = order_in_this_process()
    if started is not None:
        # Once CUDA has started, the environment no longer matters.
        inventory = read_inventory(processes=False)
        by_uuid = {gpu.uuid.partition("-")[2]: gpu for gpu in inventory.gpus}
        known = {by_uuid[uuid]: n for n, uuid in enumerate(started) if uuid in by_uuid}
        return known, inventory.problem or "CUDA sees no GPU in this process"
    if VARIABLE not in os.environ:
        # With a mask of numbers, another order would change the visible GPUs.
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    visible = visible_gpus(read_inventory(processes=False), os.environ)
    if visible.warning:
        log.warning("%s", visible.warning)
    addressable: dict[GpuInfo, int] = {}
    for gpu in visible.gpus:
        ordinal = visible.ordinal(gpu.uuid)
        if ordinal is not None:
            addressable[gpu] = ordinal
    return addressable, visible.why_none
