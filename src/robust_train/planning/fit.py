"""From predicted peaks to what fits where. Pure functions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from robust_train.batch.search import line
from robust_train.gpu.footprint import CACHE_FACTOR, footprint
from robust_train.values import GIB, MIB

WORKSPACE_BYTES = 2 * 32 * MIB
"""cuBLAS's workspaces, one for the thread of the forward and one for that of the backward pass: 32
MiB each on Hopper and Blackwell, 8.1 MiB on earlier GPUs (``parseChosenWorkspaceSize`` in torch's
CublasHandlePool.cpp)."""

LARGEST_BATCH = 1 << 16  # No larger batch is looked for
TYPICAL_SIZES = tuple(size * GIB for size in (8, 12, 16, 24, 40, 80))
"""Memory of common GPUs, bytes."""

_MOST_BY_LINE = 8


@dataclass(frozen=True)
class Peak:
    """The most memory that a step takes."""

    batch_size: int  # micro-batch, samples
    accumulates: bool  # the step has more than one micro-batch
    tensors_bytes: int  # of tensors, and of kernels while they run
    parts: Mapping[str, int]  # the same by category at that moment

    @property
    def allocated_bytes(self) -> int:
        """Return the expected ``torch.cuda.max_memory_allocated``, cuBLAS's workspaces included."""
        return self.tensors_bytes + WORKSPACE_BYTES

    @property
    def gpu_bytes(self) -> int:
        """Return what must be free on a GPU, the context and the allocator's cache included."""
        return footprint(self.allocated_bytes)


def fits(peak: Peak, free_bytes: int, total_bytes: int, fraction: float) -> bool:
    """Return whether a step fits on a GPU."""
    cache_bytes = peak.allocated_bytes * CACHE_FACTOR
    return peak.gpu_bytes <= free_bytes and cache_bytes <= fraction * total_bytes


def largest_batch(
    predict: Callable[[int], Peak], does_fit: Callable[[Peak], bool], near: int
) -> int | None:
    """Return the largest micro-batch that fits, None where a single sample does not. Predicts
    ``near`` first; the line through the last two predictions gives the next size to try, and where
    lines lead nowhere, halves do. The answer and the next size are predicted themselves."""
    tried: list[Peak] = []
    low, high, guess = 0, LARGEST_BATCH + 1, near
    while high - low > 1:
        peak = predict(guess)
        low, high = (guess, high) if does_fit(peak) else (low, guess)
        tried.append(peak)
        guess = (low + high) // 2 if high <= LARGEST_BATCH else 2 * low
        if 1 < len(tried) <= _MOST_BY_LINE:
            too_large = partial(_too_large_on_line, tried[-2], tried[-1], does_fit)
            guess = bisect_left(range(high), True, low + 1, key=too_large) - 1
        guess = min(max(guess, low + 1), high - 1)
    return low or None


def _too_large_on_line(one: Peak, last: Peak, does_fit: Callable[[Peak], bool], size: int) -> bool:
    bytes_of = line(*((peak.batch_size, peak.tensors_bytes) for peak in (one, last)))
    return not does_fit(replace(last, tensors_bytes=round(bytes_of(size))))
