"""The sizes a job may be cut into: micro-batches at one effective batch size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PolicySettings:
    """What the user asked for, as far as decisions depend on it.

    Attributes:
        batch_size: requested micro-batch of each rank.
        gradient_accumulation_steps: requested accumulation of each rank.
        ranks: requested processes that share a step, one for each GPU.
        cpu_ranks: processes on the CPU.
        num_workers: requested data-loader workers.
        min_batch_size: no attempt uses a smaller micro-batch.
        max_retries: smaller micro-batches tried on one device before it is given up, and tries of
            the same thing where a failure may pass by itself.
        may_switch_gpu: whether another GPU may be taken.
        allow_cpu_fallback: whether the CPU may be taken in the end.
        preserve_effective_batch_size: whether accumulation grows as the micro-batch shrinks.
        min_gpu_memory_bytes: memory a GPU must have free to be taken.
        prefetch_factor: requested batches that each data-loader worker prepares ahead.
        expandable_segments: what the allocator is to use from the start.
        may_use_expandable_segments: False where the user's own environment forbids them.
        may_wait: whether to wait for memory that somebody else took.
        retry_pause_seconds: before the first try of the same thing; doubles with each.
        finds_batch_size: ``batch_size`` is only the most to begin with, as it is with
            ``training.batch_size=auto``, so halving it is no retry.
    """

    batch_size: int
    gradient_accumulation_steps: int = 1
    ranks: int = 1
    cpu_ranks: int = 1
    num_workers: int = 0
    min_batch_size: int = 4
    max_retries: int = 3
    may_switch_gpu: bool = True
    allow_cpu_fallback: bool = True
    preserve_effective_batch_size: bool = True
    min_gpu_memory_bytes: int = 0
    prefetch_factor: int = 2
    expandable_segments: bool = True
    may_use_expandable_segments: bool = True
    may_wait: bool = True
    retry_pause_seconds: float = 10.0
    finds_batch_size: bool = False

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step that the user asked for."""
        return self.batch_size * self.gradient_accumulation_steps * self.ranks

    def for_ranks(self, ranks: int) -> PolicySettings:
        """The same effective batch shared by another number of processes."""
        steps = self.gradient_accumulation_steps
        if ranks == self.ranks or not self.preserve_effective_batch_size:
            return replace(self, ranks=ranks)
        share = self.batch_size * ranks
        steps = -(-self.effective_batch_size // share)
        return replace(self, ranks=ranks, gradient_accumulation_steps=steps)


def next_rung(settings: PolicySettings, batch_size: int) -> tuple[int, int]:
    """The next smaller micro-batch and its accumulation.

    At most half of ``batch_size`` but not below ``min_batch_size``; among those the largest divisor
    of a rank's share of the effective batch, so that the product stays exact. Where no divisor lies
    in that range the accumulation is rounded up, and the effective batch is no longer exact.
    """
    at_most = max(batch_size // 2, settings.min_batch_size)
    if not settings.preserve_effective_batch_size:
        return at_most, settings.gradient_accumulation_steps
    share = settings.batch_size * settings.gradient_accumulation_steps
    for candidate in range(at_most, settings.min_batch_size - 1, -1):
        if share % candidate == 0:
            return candidate, share // candidate
    return at_most, -(-share // at_most)


def at_micro_batch(settings: PolicySettings, batch_size: int) -> tuple[int, int]:
    """``batch_size`` and the accumulation that makes up the effective batch with it."""
    if not settings.preserve_effective_batch_size:
        return batch_size, settings.gradient_accumulation_steps
    share = settings.batch_size * settings.gradient_accumulation_steps
    return batch_size, -(-share // batch_size)


def ladder(settings: PolicySettings) -> Iterator[tuple[int, int]]:
    """Every (micro-batch, accumulation) from the requested one down to ``min_batch_size``."""
    rung = settings.batch_size, settings.gradient_accumulation_steps
    yield rung
    while rung[0] > settings.min_batch_size:
        rung = next_rung(settings, rung[0])
        yield rung
