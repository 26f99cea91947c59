"""The best GPU for the calling process itself, without a launcher."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from robust_train.gpu.cuda_order import order_in_this_process
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.select import explain, rank
from robust_train.gpu.visible import VARIABLE, visible_gpus
from robust_train.model.gpu import GpuInfo
from robust_train.readable import MIB

log = logging.getLogger("robust_train")

if TYPE_CHECKING:
    import torch


def find_best_device(min_memory_mb: int = 4000) -> torch.device:
    """Return the GPU with the most free memory as a device for this process, or the CPU.

    Considers only GPUs that CUDA_VISIBLE_DEVICES shows; a log line has the reason for the CPU. Does
    not wait, reserve, or start CUDA. Where neither CUDA_VISIBLE_DEVICES nor CUDA_DEVICE_ORDER is
    set and CUDA has not started, CUDA_DEVICE_ORDER=PCI_BUS_ID is put into ``os.environ``: without
    it the same number could mean another GPU when CUDA starts.

    Args:
        min_memory_mb: free memory that is needed, in MiB.
    """
    import torch

    if torch.version.cuda is None:
        log.info("training on the CPU: this build of PyTorch has no CUDA")
        return torch.device("cpu")
    addressable, reason = _addressable_gpus()
    min_bytes = min_memory_mb * MIB
    ranked = rank(list(addressable), min_bytes)
    if not ranked:
        why = reason or f"no suitable GPU: {explain(list(addressable), min_bytes)}"
        log.info("training on the CPU: %s", why)
        return torch.device("cpu")
    return torch.device("cuda", addressable[ranked[0]])


def _addressable_gpus() -> tuple[dict[GpuInfo, int], str | None]:
    """Return GPUs with their CUDA ordinals in this process; if there are none, why."""
    started = order_in_this_process()
    if started is not None:
        # what the environment contains now no longer counts
        inventory = read_inventory(processes=False)
        here = {gpu.uuid.partition("-")[2]: gpu for gpu in inventory.gpus}
        found = {
            here[uuid]: ordinal for ordinal, uuid in enumerate(started) if uuid in here
        }
        return (
            found,
            None if found else inventory.problem or "CUDA sees no GPU in this process",
        )
    if VARIABLE not in os.environ:
        # a mask of numbers would mean other GPUs under another order, so not beside a mask
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    visible = visible_gpus(read_inventory(processes=False), os.environ)
    if visible.warning is not None:
        log.warning("%s", visible.warning)
    known = {gpu: visible.ordinal(gpu.uuid) for gpu in visible.gpus}
    found = {gpu: ordinal for gpu, ordinal in known.items() if ordinal is not None}
    return found, None if found else visible.why_none
