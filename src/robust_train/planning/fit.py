"""From predicted peaks to what fits where. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
        tensors_bytes: of tensors, and of what kernels hold while they run.
        parts: the same by category at that moment.
    """

    batch_size: int
    accumulates: bool
    tensors_bytes: int
    parts: Mapping[str, int]

    @property
    def allocated_bytes(self) -> int:
        """What ``torch.cuda.max_memory_allocated`` will tell: tensors and cuBLAS's workspaces."""
        return self.tensors_bytes + WORKSPACE_BYTES

    @property
    def gpu_bytes(self) -> int:
        """What must be free on a GPU, the context and the allocator's cache included."""
        return footprint(self.allocated_bytes)


def fits(peak: Peak, free_bytes: int, total_bytes: int, fraction: float) -> bool:
    """Whether a step goes through on a GPU.

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
    """The largest micro-batch that fits, None where a single sample does not.

    Memory is near-affine in the batch, so the line through two predictions says where to look. The
    answer is always a size that was predicted itself and found to fit; the next one does not fit by
    a prediction of its own or by the line through this one.

    Args:
        predict: the peak of a size; called about three times.
        does_fit: whether a peak fits.
        near: where to begin: this size and twice as much.
    """
    below, above = predict(near), predict(2 * near)
    low = next((peak for peak in (above, below) if does_fit(peak)), None)
    high = next((peak for peak in (below, above) if not does_fit(peak)), None)
    for _ in range(_MOST_TRIES):
        least = 0 if low is None else low.batch_size
        most = LARGEST_BATCH if high is None else high.batch_size - 1
        guess = _last_on_line(below, above, does_fit, least, most)
        if guess == 0 and most:
            # the line may be wrong about the smallest
            guess = 1
        if guess == least:
            break
        tried = predict(guess)
        if does_fit(tried):
            low = tried
        else:
            high = tried
        # the line goes through the newest and the known size nearest to it
        nearest = min((below, above), key=lambda peak: abs(peak.batch_size - guess))
        below, above = sorted((nearest, tried), key=lambda peak: peak.batch_size)
    return None if low is None else low.batch_size


def _last_on_line(
    below: Peak, above: Peak, does_fit: Callable[[Peak], bool], least: int, most: int
) -> int:
    """The last size from ``least`` to ``most`` that fits by the line through two peaks."""
    slope = (above.tensors_bytes - below.tensors_bytes) / (above.batch_size - below.batch_size)

    def on_line(size: int) -> Peak:
        tensors = above.tensors_bytes + round(slope * (size - above.batch_size))
        return Peak(size, above.accumulates, tensors, {})

    while least < most:
        middle = (least + most + 1) // 2
        if does_fit(on_line(middle)):
            least = middle
        else:
            most = middle - 1
    return least


def error_percent(predicted: int, measured: int) -> float:
    """How far a prediction is off what was measured, in percent of that; positive: too high."""
    return 100 * (predicted / measured - 1)
