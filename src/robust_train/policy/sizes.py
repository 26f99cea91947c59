"""The arithmetic of micro-batch sizes. Pure, and used in any process.

A job keeps its effective batch, the micro-batch times the accumulation, so a smaller micro-batch
should divide it. For example, with an effective batch of 100, the sizes after 100 are 50, 25, 10,
5, 2 and 1. The launcher's policy chooses among these sizes after a lack of memory, and an attempt
does when it repeats a step or searches.
"""

from __future__ import annotations


def next_smaller(batch_size: int, least: int, share: int = 0) -> int:
    """Return the next smaller micro-batch.

    It is the largest divisor of ``share`` that is at most half of ``batch_size`` and at least
    ``least``. If ``share`` has no such divisor, it is half of ``batch_size``. Then the accumulation
    is rounded up, and the effective batch is not exact.

    Args:
        batch_size: the current micro-batch.
        least: the smallest micro-batch that is allowed.
        share: a rank's samples of the effective batch. 0 if the effective batch may change.
    """
    half = max(batch_size // 2, least)
    for size in range(half, least - 1, -1):
        if share % size == 0:
            return size
    return half


def exact_sizes(effective_batch_size: int, min_batch_size: int) -> tuple[int, ...]:
    """Return the divisors of the effective batch from ``min_batch_size`` on, smallest first. Only
    with these sizes does accumulation keep the effective batch exactly."""
    least = min(min_batch_size, effective_batch_size)
    sizes = range(least, effective_batch_size + 1)
    return tuple(size for size in sizes if effective_batch_size % size == 0)


def micro_batch_sizes(effective_batch_size: int, min_batch_size: int) -> tuple[int, ...]:
    """Return :func:`exact_sizes`, and the sizes that the policy would halve to. A loop that splits
    its own batches needs the latter if the divisors are far apart."""
    size = effective_batch_size
    least = min(min_batch_size, effective_batch_size)
    sizes = {size}.union(exact_sizes(effective_batch_size, least))
    while size > least:
        size = next_smaller(size, least, effective_batch_size)
        sizes.add(size)
    return tuple(sorted(sizes))
