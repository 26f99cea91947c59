"""CUDA's caching allocator in this process, and its devices. Never starts CUDA."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

HOST = -1  # The host's memory, among the numbers of `ordinal_of`
_DEFAULT_POOL = (0, 0)


def started_torch() -> Any:
    """Return the module torch if it has started CUDA in this process, else None."""
    torch = sys.modules.get("torch")
    # another thread may be importing it at this moment
    is_initialized = getattr(getattr(torch, "cuda", None), "is_initialized", None)
    return torch if is_initialized is not None and is_initialized() else None


def usable_torch() -> Any:
    """Return the module torch if it is loaded and CUDA can be used, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


def device_index(device: str) -> int | None:
    """Return the number in ``cuda:1`` (``cuda`` is 0), None for any other device."""
    kind, _, number = device.partition(":")
    return int(number or 0) if kind == "cuda" else None


def ordinal_of(device: Any) -> int | None:
    """Return CUDA's number of ``device``, :data:`HOST` for the CPU, None if it has no number.
    Raises ValueError: it names no device."""
    if device is None:
        return None
    if isinstance(device, int):
        if device < 0:
            raise ValueError(f"device {device}: a number from 0 on")
        return device
    match = re.fullmatch(r"(cpu)(?::0)?|cuda(?::(\d+))?", str(device))
    if match is None:
        raise ValueError(
            f"device {str(device)!r}: accepted are cpu, cuda, cuda:<number>, a number"
        )
    if match[1]:
        return HOST
    return None if match[2] is None else int(match[2])


def started_gpu(device: Any) -> tuple[Any, int] | None:
    """Return torch and the number of ``device`` if that is a GPU and CUDA has started. Raises
    ValueError: this process has no such device."""
    ordinal = ordinal_of(device)
    torch = None if ordinal == HOST else started_torch()
    return None if torch is None else (torch, gpu_number(torch, ordinal))


def gpu_number(torch: Any, ordinal: int | None) -> int:
    """Return ``ordinal``, or without one the GPU of :func:`busiest_gpu`. Raises ValueError: this
    process has no such GPU."""
    if ordinal is None:
        return busiest_gpu(torch)
    if ordinal >= torch.cuda.device_count():
        raise ValueError(
            f"device cuda:{ordinal}: this process sees {torch.cuda.device_count()}"
        )
    return ordinal


def busiest_gpu(torch: Any) -> int:
    """Return the GPU on which this process holds most; CUDA's current one if it holds nothing. A
    trainer may put its model on another GPU than the current one."""
    held = [
        torch.cuda.memory_reserved(index) for index in range(torch.cuda.device_count())
    ]
    return held.index(max(held)) if any(held) else int(torch.cuda.current_device())


@dataclass(frozen=True)
class Cached:
    """Bytes that the allocator holds on one GPU: ``allocated`` to tensors, ``reserved`` in all."""

    allocated: int
    reserved: int

    @property
    def unused_share(self) -> float:
        """Share of the reserved memory that no tensor uses, 0 to 1."""
        return 1 - self.allocated / self.reserved if self.reserved else 0.0


def cached_on(index: int | None) -> Cached | None:
    """Return the figures of a GPU as this process counts; None if CUDA has not started."""
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


def alloc_retries() -> int | None:
    """Return how often the allocator has emptied its cache to find room; None without CUDA."""
    torch = started_torch()
    if torch is None:
        return None
    try:
        figures = map(
            torch.cuda.memory_stats_as_nested_dict, range(torch.cuda.device_count())
        )
        return sum(int(found.get("num_alloc_retries", 0)) for found in figures)
    except RuntimeError:  # after a fault
        return None


@dataclass(frozen=True)
class Segment:
    """A stretch of GPU memory that the allocator holds, and the sizes of its unused blocks."""

    device: int
    is_private: bool
    unused: tuple[int, ...] = ()


def memory_segments(torch: Any) -> list[Segment] | None:
    """Return the allocator's segments; None if it has none (``backend:cudaMallocAsync``)."""
    try:
        try:
            # without the recorded history, which may be gigabytes
            found = torch.cuda.memory_snapshot(include_traces=False)
        except TypeError:
            found = torch.cuda.memory_snapshot()
    except RuntimeError:
        return None
    return [_segment(entry) for entry in found]


def _segment(entry: Mapping[str, Any]) -> Segment:
    blocks = entry["blocks"]
    return Segment(
        entry["device"],
        is_private=tuple(entry.get("segment_pool_id", _DEFAULT_POOL)) != _DEFAULT_POOL,
        unused=tuple(
            int(block["size"]) for block in blocks if block["state"] == "inactive"
        ),
    )


def unused_blocks(segments: Iterable[Segment], index: int) -> tuple[int, int]:
    """Return the largest unused block of a GPU, and the sum of all, in bytes. Blocks in private
    pools (CUDA graphs) do not count: only their graph can use them."""
    shared = [s for s in segments if s.device == index and not s.is_private]
    sizes = [size for segment in shared for size in segment.unused]
    return max(sizes, default=0), sum(sizes)
