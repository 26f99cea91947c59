"""What a process takes of a GPU beside its tensors."""

from __future__ import annotations

from robust_train.values import MIB

CONTEXT_BYTES = 512 * MIB
"""A CUDA context with its kernels, which NVML shows beside torch's cache. Reported are 274 MiB
(pytorch/pytorch#86509) to 426 MiB (torch 2.10 on an RTX 6000 Ada, unslothai/unsloth-zoo#1053); it
grows with the kernels that are used."""

CACHE_FACTOR = 1.1
"""Bytes that the caching allocator holds for each that tensors take at their peak: it asks the
driver for 2 MiB or 20 MiB at least (``kSmallBuffer``, ``kLargeBuffer`` in CUDACachingAllocator.h)
and keeps what lies between tensors. With expandable segments it is mostly less."""


def footprint(allocated_bytes: int) -> int:
    """Bytes that NVML shows for a process whose tensors take ``allocated_bytes`` at their peak."""
    return int(allocated_bytes * CACHE_FACTOR) + CONTEXT_BYTES
