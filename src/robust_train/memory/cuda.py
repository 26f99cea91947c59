"""Reads the devices and figures of CUDA's caching allocator in this process.

Called in the process that trains and in a user's own process. This module neither imports torch nor
starts CUDA. If torch has not started CUDA in this process, no figures are available.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# The allocator's common pool of segments. Each CUDA graph has a private pool.
_COMMON_POOL = (0, 0)
# Stands for the host among the numbers that `ordinal_of` returns.
HOST = -1


# --- devices ---


def started_torch() -> Any:
    """Return the module torch if it has started CUDA in this process, else None."""
    torch = sys.modules.get("torch")
    # Another thread may be importing torch at this moment, so torch.cuda may be missing.
    is_initialized = getattr(getattr(torch, "cuda", None), "is_initialized", None)
    return torch if is_initialized is not None and is_initialized() else None


def device_index(device: str) -> int | None:
    """Return the number in ``cuda:1``, 0 for ``cuda``, and None for any other device."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return None
    return int(number or 0)


def ordinal_of(device: Any) -> int | None:
    """Return CUDA's number of ``device``, `HOST` for the CPU, or None if it has no number.

    Raises:
        ValueError: ``device`` does not name a device.
    """
    if isinstance(device, int) and device >= 0:
        return device
    names = r"None|(?P<host>cpu)(:0)?|cuda(:(?P<number>\d+))?"
    match = re.fullmatch(names, str(device))
    if match is None:
        raise ValueError(f"device {str(device)!r}: accepted are cpu, cuda, cuda:<number>, a number")
    if match["host"]:
        return HOST
    return None if match["number"] is None else int(match["number"])


def started_gpu(device: Any) -> tuple[Any, int] | None:
    """Return torch and the number of ``device`` if it is a GPU and CUDA has started, else None.

    Raises:
        ValueError: this process has no such device.
    """
    ordinal = ordinal_of(device)
    torch = started_torch()
    if ordinal == HOST or torch is None:
        return None
    return torch, gpu_number(torch, ordinal)


def gpu_number(torch: Any, ordinal: int | None) -> int:
    """Return the number of a GPU. None stands for the GPU that this process uses most.

    Raises:
        ValueError: this process has no such GPU.
    """
    if ordinal is None:
        return busiest_gpu(torch)
    if ordinal >= torch.cuda.device_count():
        raise ValueError(f"device cuda:{ordinal}: this process sees {torch.cuda.device_count()}")
    return ordinal


def busiest_gpu(torch: Any) -> int:
    """Return the number of the GPU on which this process holds the most memory.

    That is the GPU of the model, which need not be CUDA's current GPU. If the process holds no
    memory, return the current GPU.
    """
    held = [torch.cuda.memory_reserved(index) for index in range(torch.cuda.device_count())]
    if not any(held):
        return int(torch.cuda.current_device())
    return held.index(max(held))


def gpu_uuid(torch: Any, index: int) -> str:
    """Return the UUID of a GPU of this process, in the form that NVML uses."""
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


# --- figures ---


@dataclass(frozen=True)
class Cached:
    """Bytes that the allocator holds on a GPU."""

    allocated: int = 0  # in tensors
    reserved: int = 0  # in total

    @property
    def unused_share(self) -> float:
        """The share of the reserved memory that no tensor uses, from 0 to 1."""
        if not self.reserved:
            return 0.0
        return 1 - self.allocated / self.reserved


def cached_on(index: int | None) -> Cached | None:
    """Return the bytes that the allocator holds on a GPU, or None if CUDA has not started."""
    torch = started_torch()
    if index is None or torch is None:
        return None
    try:
        figures = torch.cuda.memory_stats_as_nested_dict(index)
        return Cached(
            allocated=figures["allocated_bytes"]["all"]["current"],
            reserved=figures["reserved_bytes"]["all"]["current"],
        )
    # The dictionary is empty before the first allocation. After a device fault, the call fails.
    except (KeyError, RuntimeError):
        return None


def alloc_retries(index: int | None) -> int | None:
    """Return how many times the allocator emptied its cache to find room on a GPU.

    Return None without CUDA. This is called in each step, so it reads the figures of one GPU only.
    """
    torch = started_torch()
    if torch is None or index is None:
        return None
    try:
        return int(torch.cuda.memory_stats_as_nested_dict(index).get("num_alloc_retries", 0))
    except RuntimeError:  # after a device fault
        return None


def memory_segments(torch: Any) -> list[Any] | None:
    """Return the allocator's segments as torch lists them.

    Return None for an allocator that has no segments, such as ``backend:cudaMallocAsync``.
    """
    with contextlib.suppress(RuntimeError):
        try:
            # Without the recorded history, which may take gigabytes.
            return list(torch.cuda.memory_snapshot(include_traces=False))
        except TypeError:  # an older torch without that parameter
            return list(torch.cuda.memory_snapshot())
    return None


def holds_graphs() -> bool | None:
    """Return whether a CUDA graph was captured, whose memory cannot be reused.

    Return None if that is unknown, for example without CUDA.
    """
    torch = started_torch()
    if torch is None:
        return None
    segments = memory_segments(torch)
    if segments is None:
        return None
    return any(_is_private(segment) for segment in segments)


def unused_blocks(segments: Iterable[Any], index: int) -> tuple[int, float]:
    """Return the size of a GPU's largest unused block, and the share of unused bytes outside of it.

    The share goes from 0 (a single block) to 1. Blocks in private pools do not count, because only
    their CUDA graph can use them.
    """
    sizes = [
        int(block["size"])
        for segment in segments
        if segment["device"] == index and not _is_private(segment)
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    largest = max(sizes, default=0)
    if not largest:
        return 0, 0.0
    return largest, 1 - largest / sum(sizes)


def _is_private(segment: Any) -> bool:
    return tuple(segment.get("segment_pool_id", _COMMON_POOL)) != _COMMON_POOL
