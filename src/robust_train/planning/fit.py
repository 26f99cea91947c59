"""From predicted peaks to what fits where. Pure functions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from robust_train.batch.search import Line
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

_MOST_TRIES = 12


@dataclass(frozen=True)
class Peak:
    """The most memory that a step takes.

    Attributes:
        batch_size: micro-batch, samples.
        accumulates: the step has more than one micro-batch.
        tensors_bytes: of tensors, and of kernels while they run.
        parts: the same by category at that moment.
    """

    batch_size: int
    accumulates: bool
    tensors_bytes: int
    parts: Mapping[str, int]

    @property
    def allocated_bytes(self) -> int:
        """Return the expected ``torch.cuda.max_memory_allocated``, cuBLAS's workspaces included."""
        return self.tensors_bytes + WORKSPACE_BYTES

    @property
    def gpu_bytes(self) -> int:
        """Return what must be free on a GPU, the context and the allocator's cache included."""
        return footprint(self.allocated_bytes)


def fits(peak: Peak, free_bytes: int, total_bytes: int, fraction: float) -> bool:
    """Return whether a step fits on a GPU.

    Args:
        peak: of the step.
        free_bytes: that the job can count on there.
        total_bytes: size of the GPU.
        fraction: ``memory.fraction``, of the size, which the job's cache may take at most.
    """
    cache_bytes = peak.allocated_bytes * CACHE_FACTOR
    return peak.gpu_bytes <= free_bytes and cache_bytes <= fraction * total_bytes


def largest_batch(
    predict: Callable[[int], Peak], does_fit: Callable[[Peak], bool], near: int
) -> int | None:
    """Return the largest micro-batch that fits, None where a single sample does not.

    Memory is near-affine in the batch, so the line through two predictions gives the size to try.
    The result is always a size that was predicted itself and found to fit; the next one does not
    fit by a prediction of its own or by the line through this one.

    Args:
        predict: the peak of a size; called about three times.
        does_fit: whether a peak fits.
        near: where to begin: this size and twice as much.
    """
    below, above = predict(near), predict(2 * near)
    low = next((peak.batch_size for peak in (above, below) if does_fit(peak)), 0)
    high = next((p.batch_size for p in (below, above) if not does_fit(p)), LARGEST_BATCH + 1)
    for _ in range(_MOST_TRIES):
        ends = (below.batch_size, below.tensors_bytes), (above.batch_size, above.tensors_bytes)
        slope = Line.through(*ends).per_sample

        def is_too_large(size: int, slope: float = slope, like: Peak = above) -> bool:
            # from a peak that is known, not from zero: rounding would be off by a byte
            tensors = like.tensors_bytes + round(slope * (size - like.batch_size))
            return not does_fit(replace(like, tensors_bytes=tensors))

        # the line may be wrong about the smallest
        sizes = range(low + 1, high)
        guess = low + bisect_left(sizes, True, key=is_too_large) or min(1, len(sizes))
        if guess == low:
            break
        tried = predict(guess)
        low, high = (guess, high) if does_fit(tried) else (low, guess)
        # the line goes through the newest and the known size nearest to it
        nearest = min((below, above), key=lambda peak: abs(peak.batch_size - guess))
        below, above = sorted((nearest, tried), key=lambda peak: peak.batch_size)
    return low or None


def error_percent(predicted: int, measured: int) -> float:
    """Return the error of a prediction in percent of what was measured; positive: too high."""
    return 100 * (predicted / measured - 1)
