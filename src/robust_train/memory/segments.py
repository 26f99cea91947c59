"""What CUDA's caching allocator holds in this process, and for which devices. Never starts CUDA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from robust_train.memory.holders import started_torch

Segments = Sequence[Mapping[str, Any]]
"""What ``torch.cuda.memory_snapshot()`` returns."""

_DEFAULT_POOL = (0, 0)


@dataclass(frozen=True)
class Cached:
    """What the caching allocator of this process holds on one GPU, in bytes.

    Attributes:
        allocated: by tensors.
        reserved: taken from the driver.
    """

    allocated: int
    reserved: int

    @property
    def unused_share(self) -> float:
        """Share of the reserved memory that no tensor uses, 0 to 1."""
        return 1 - self.allocated / self.reserved if self.reserved else 0.0


def cached_on(index: int | None) -> Cached | None:
    """Return the figures of a GPU of this process's own numbering.

    None where this process has not started CUDA through torch, or without an ``index``.
    """
    torch = started_torch()
    if index is None or torch is None:
        return None
    try:
        figures = torch.cuda.memory_stats_as_nested_dict(index)
        return Cached(
            figures["allocated_bytes"]["all"]["current"],
            figures["reserved_bytes"]["all"]["current"],
        )
    except (KeyError, RuntimeError):
        return None


def device_index(device: str) -> int | None:
    """Return the number in ``cuda:1`` (``cuda`` is 0), None for any other device."""
    kind, _, number = device.partition(":")
    return int(number or 0) if kind == "cuda" else None


def busiest_gpu(torch: Any) -> int:
    """Return the GPU on which this process holds most; CUDA's current one where it holds nothing.

    A trainer may put its model on another GPU than the current one.
    """
    held = [torch.cuda.memory_reserved(index) for index in range(torch.cuda.device_count())]
    return held.index(max(held)) if any(held) else int(torch.cuda.current_device())


def memory_segments(torch: Any) -> Segments | None:
    """Return the allocator's segments; None where it has none (``backend:cudaMallocAsync``)."""
    try:
        try:
            # without the recorded history, which may be gigabytes
            found: Segments = torch.cuda.memory_snapshot(include_traces=False)
        except TypeError:
            found = torch.cuda.memory_snapshot()
    except RuntimeError:
        return None
    return found


def has_private_pools(segments: Segments | None) -> bool | None:
    """Whether a captured CUDA graph has memory of its own; None if unknown."""
    if segments is None:
        return None
    return any(_pool(segment) != _DEFAULT_POOL for segment in segments)


def unused_blocks(segments: Segments, index: int) -> tuple[int, int]:
    """Return the largest unused block of a GPU, and the sum of all, in bytes.

    Blocks in private pools (CUDA graphs) do not count: only their graph can use them.
    """
    sizes = [
        int(block["size"])
        for segment in segments
        if segment["device"] == index and _pool(segment) == _DEFAULT_POOL
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    return max(sizes, default=0), sum(sizes)


def _pool(segment: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(segment.get("segment_pool_id", _DEFAULT_POOL))
