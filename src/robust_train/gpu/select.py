"""Choose a GPU, and explain why others are unsuitable.

Pure functions over frozen values, except for `find_best_device`, which works without a launcher.
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

_BUSY_PERCENT = 10
_BUSY_BYTES = 2 * GIB


def rank(gpus: Sequence[GpuInfo], min_bytes: int) -> list[GpuInfo]:
    """Return the GPUs that a job needing ``min_bytes`` could start on now, best first. Most free
    memory comes first, then the least busy (unknown last), then the lowest PCI address."""
    suitable = [gpu for gpu in gpus if gpu.unusable is None and gpu.free_bytes >= min_bytes]
    return sorted(suitable, key=lambda gpu: (-gpu.free_bytes, tie_breaker(gpu)))


def tie_breaker(gpu: GpuInfo) -> tuple[int, str, str]:
    """Return a sort key among equal GPUs: the least busy, then the lowest PCI address."""
    busy = gpu.utilization_percent
    return 101 if busy is None else busy, gpu.pci_bus_id, gpu.uuid


def choose_group(gpus: Sequence[GpuInfo], count: int) -> Group:
    """Return ``count`` of the GPUs, which are best first, or none if they are too few. They have
    the same model if enough of them do, because a group is as slow as its slowest GPU."""
    alike: dict[tuple[str, int], list[GpuInfo]] = {}
    for gpu in gpus:
        group = alike.setdefault((gpu.name, gpu.total_bytes), [])
        group.append(gpu)
        if len(group) == count:
            return tuple(group)
    return tuple(gpus[:count]) if len(gpus) >= count else ()


def can_be_one_of(gpu: GpuInfo, count: int) -> bool:
    """Return whether a job of ``count`` GPUs can have this GPU. CUDA shows a process only a single
    MIG slice."""
    return count == 1 or gpu.parent_uuid is None


def could_ever_fit(gpu: GpuInfo, min_bytes: int) -> bool:
    """Return whether it is large enough, readable, and open to computing."""
    return gpu.compute_mode != "prohibited" and 0 < gpu.total_bytes >= min_bytes


def explain(gpus: Sequence[GpuInfo], min_bytes: int) -> str:
    """Return the requirements, and why each GPU does not meet them, in one line."""
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
    """Return ``python (pid 812, ada) 14000 MiB``, as far as it is known."""
    holder = holders.get(process.pid)
    who = f"pid {process.pid}"
    if holder is not None:
        who = f"{holder.command} ({who}, {holder.user})"
    return who if process.used_bytes is None else f"{who} {mib(process.used_bytes)}"


def others_on(gpu: GpuInfo, holders: Mapping[int, GpuUser], ours: Collection[int] = ()) -> str:
    """Describe the other users of a GPU that was read with its processes. Empty if only ``ours``
    compute there. If processes are not listed (in a container, under WSL), memory and utilisation
    show them."""
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
    """Return the best GPU on which only ``ours`` compute, or None."""
    free = [gpu for gpu in gpus if not others_on(gpu, {}, ours)]
    return next(iter(rank(free, 0)), None)


def find_best_device(min_memory_mb: int = 4000) -> torch.device:
    """Return the GPU with the most free memory as a device for this process, or the CPU.

    Considers only GPUs that CUDA_VISIBLE_DEVICES shows. A log line gives the reason for the CPU.
    Does not wait, reserve, or start CUDA. If neither CUDA_VISIBLE_DEVICES nor CUDA_DEVICE_ORDER is
    set and CUDA has not started, this sets CUDA_DEVICE_ORDER=PCI_BUS_ID in ``os.environ``. Without
    it, the same number could mean another GPU when CUDA starts.

    Args:
        min_memory_mb: the required free memory, in MiB.

    Returns:
        ``cuda:0`` and so on as this process counts, or ``cpu``.
    """
    import torch

    if torch.version.cuda is None:
        log.info("training on the CPU: this build of PyTorch has no CUDA")
        return torch.device("cpu")
    ordinals, why = _addressable_gpus()
    gpus = tuple(ordinals)
    min_bytes = min_memory_mb * MIB
    for best in rank(gpus, min_bytes):
        return torch.device("cuda", ordinals[best])
    if gpus:
        why = f"no suitable GPU: {explain(gpus, min_bytes)}"
    log.info("training on the CPU: %s", why)
    return torch.device("cpu")


def _addressable_gpus() -> tuple[dict[GpuInfo, int], str]:
    """Return GPUs with their CUDA ordinals in this process, and why there are none."""
    started = order_in_this_process()
    if started is not None:
        # what the environment contains now no longer counts
        inventory = read_inventory(processes=False)
        here = {gpu.uuid.partition("-")[2]: gpu for gpu in inventory.gpus}
        numbers = {here[uuid]: n for n, uuid in enumerate(started) if uuid in here}
        return numbers, inventory.problem or "CUDA sees no GPU in this process"
    if VARIABLE not in os.environ:
        # a mask of numbers would mean other GPUs under another order, so not beside a mask
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    visible = visible_gpus(read_inventory(processes=False), os.environ)
    if visible.warning:
        log.warning("%s", visible.warning)
    ordinals = {gpu: visible.ordinal(gpu.uuid) for gpu in visible.gpus}
    numbers = {gpu: ordinal for gpu, ordinal in ordinals.items() if ordinal is not None}
    return numbers, visible.why_none
