"""From predicted peaks to what fits where. Pure functions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from robust_train.gpu.footprint import CACHE_FACTOR, footprint
from robust_train.values import GIB, MIB

WORKSPACE_BYTES = 2 * 32 * MIB
"""cuBLAS's workspaces, one for the thread of the forward and one for that of the backward pass: 32
MiB each on Hopper and Blackwell, 8.1 MiB on earlier GPUs (``parseChosenWorkspaceSize`` in torch's
CublasHandlePool.cpp)."""

LARGEST_BATCH = 1 << 16
"""No larger batch is looked for."""

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
    """Return the largest micro-batch that fits, None where a single sample does not.

    The line through two predictions gives the next size to try; where lines lead nowhere, halves
    do. The answer was predicted itself. The next size does not fit by a prediction of its own, or
    because memory is convex in the batch: it grows at least as fast as below the answer.

    Args:
        predict: the peak of a size; called about three times.
        does_fit: whether a peak fits.
        near: where to begin. Memory is convex from there on, and below it, where steps accumulate.
    """
    tried: list[Peak] = []
    low, high, guess = 0, LARGEST_BATCH + 1, near
    while high - low > 1:
        peak = predict(guess)
        if does_fit(peak):
            low = guess
        else:
            high = guess
        if guess < near or high > near:  # what is tried from now on is on the same side
            tried.append(peak)
        below = sorted((p for p in tried if p.batch_size <= low), key=lambda p: p.batch_size)
        if len(below) > 1 and not does_fit(_on_line(below[-2], below[-1], low + 1)):
            break
        guess = (low + high) // 2 if high <= LARGEST_BATCH else 2 * low
        if 1 < len(tried) <= _MOST_BY_LINE:
            one, other = tried[-2:]
            sizes = range(low + 1, high)
            fitting = bisect_left(sizes, True, key=lambda n: not does_fit(_on_line(one, other, n)))
            guess = max(low + fitting, low + 1)
        guess = min(max(guess, low + 1), high - 1)
    return low or None


def _on_line(one: Peak, other: Peak, size: int) -> Peak:
    """Return the peak of ``size`` on the line through two others, rounded up to a byte."""
    rise = (other.tensors_bytes - one.tensors_bytes) * (size - other.batch_size)
    run = other.batch_size - one.batch_size
    if run < 0:
        rise, run = -rise, -run
    return replace(other, tensors_bytes=other.tensors_bytes - (-rise // run))


def error_percent(predicted: int, measured: int) -> float:
    """Return the error of a prediction in percent of what was measured; positive: too high."""
    return 100 * (predicted / measured - 1)
