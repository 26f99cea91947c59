"""What decisions depend on, and the sizes that a job's batch may be split into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from robust_train.model.decision import RetryRule


@dataclass(frozen=True)
class PolicySettings:
    """What the user asked for, as far as decisions depend on it."""

    batch_size: int  # requested micro-batch of each rank
    gradient_accumulation_steps: int = 1  # requested accumulation of each rank
    ranks: int = 1  # requested processes that share a step, one for each GPU
    cpu_ranks: int = 1  # processes on the CPU
    min_ranks: int | None = (
        None  # fewest GPUs to go on with; None: never fewer than `ranks`
    )
    num_workers: int = 0  # requested data-loader workers
    min_batch_size: int = 4  # no attempt uses a smaller micro-batch
    # smaller micro-batches tried on one device, and failures in the same way, before something
    # else is tried; both since the last checkpoint of a later step
    max_retries: int = 3
    may_switch_gpu: bool = True  # whether another GPU may be taken
    allow_cpu_fallback: bool = True  # whether the CPU may be taken in the end
    # whether accumulation grows as the micro-batch shrinks
    preserve_effective_batch_size: bool = True
    min_gpu_memory_bytes: int = 0  # memory a GPU must have free to be taken
    prefetch_factor: int = (
        2  # requested batches that each data-loader worker prepares ahead
    )
    expandable_segments: bool = True  # what the allocator uses from the start
    may_use_expandable_segments: bool = (
        True  # False where the user's own environment settles it
    )
    may_wait: bool = (
        True  # whether to wait for a GPU or for memory that other processes took
    )
    retry_pause_seconds: float = (
        10.0  # before the first retry of the same thing; doubles with each
    )
    # `training.batch_size=auto`: `batch_size` is only the largest, so halving it is no retry
    finds_batch_size: bool = False
    can_probe: bool = (
        True  # an attempt can find the size before it trains; a script cannot
    )
    found_sizes: Mapping[str, int] = field(
        default_factory=dict
    )  # by earlier launches, by device
    requested_size: int | None = (
        None  # in an earlier launch, by `robust-train run halve-batch`
    )
    may_report: bool = True  # an attempt can report its steps, if its trainer does
    reports_start: bool = False  # the trainer is known to report when training begins
    has_batch: bool = True  # the trainer is given a batch size
    gradient_checkpointing: bool = False  # what the user asked for
    # whether it may be turned on: the trainer heeds it, and the user allows it
    may_checkpoint_gradients: bool = False
    rules: tuple[RetryRule, ...] = ()  # the user's own, in order

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step that the user asked for."""
        return self.share * self.ranks

    @property
    def share(self) -> int:
        """Samples of each rank per optimizer step."""
        return self.batch_size * self.gradient_accumulation_steps

    def for_ranks(self, ranks: int) -> PolicySettings:
        """Share the same effective batch among another number of processes."""
        if ranks == self.ranks or not self.preserve_effective_batch_size:
            return replace(self, ranks=ranks)
        total = self.effective_batch_size
        exact = (
            size
            for size in range(self.batch_size, self.min_batch_size - 1, -1)
            if total % (size * ranks) == 0
        )
        size = next(exact, self.batch_size)
        steps = -(-total // (size * ranks))
        return replace(
            self, batch_size=size, ranks=ranks, gradient_accumulation_steps=steps
        )

    def fewer_ranks(self, ranks: int) -> tuple[int, ...]:
        """Return the allowed numbers of GPUs below ``ranks``, most first.

        Each divides the effective batch size, where that is to be preserved.
        """
        least = ranks if self.min_ranks is None else self.min_ranks
        return tuple(
            fewer
            for fewer in range(ranks - 1, least - 1, -1)
            if not self.preserve_effective_batch_size
            or self.for_ranks(fewer).effective_batch_size == self.effective_batch_size
        )


def with_accumulation(settings: PolicySettings, batch_size: int) -> tuple[int, int]:
    """Return ``batch_size`` and the accumulation that makes up the effective batch with it."""
    if not settings.preserve_effective_batch_size:
        return batch_size, settings.gradient_accumulation_steps
    return batch_size, -(-settings.share // batch_size)


def next_smaller(settings: PolicySettings, batch_size: int) -> tuple[int, int]:
    """Return the next smaller micro-batch and its accumulation.

    At most half of ``batch_size``, not below ``min_batch_size``; among those the largest divisor
    of a rank's share of the effective batch. Without a divisor in that range the accumulation is
    rounded up, and the effective batch is no longer exact.
    """
    at_most = max(batch_size // 2, settings.min_batch_size)
    if settings.preserve_effective_batch_size:
        for candidate in range(at_most, settings.min_batch_size - 1, -1):
            if settings.share % candidate == 0:
                return candidate, settings.share // candidate
    return with_accumulation(settings, at_most)


def sizes(settings: PolicySettings) -> Iterator[tuple[int, int]]:
    """Yield each (micro-batch, accumulation) from the requested one to ``min_batch_size``."""
    size = settings.batch_size, settings.gradient_accumulation_steps
    yield size
    while size[0] > settings.min_batch_size:
        size = next_smaller(settings, size[0])
        yield size


def largest_up_to(settings: PolicySettings, at_most: float) -> tuple[int, int]:
    """Return the largest of :func:`sizes` that is no larger, else the smallest."""
    size = settings.batch_size, settings.gradient_accumulation_steps
    for size in sizes(settings):
        if size[0] <= at_most:
            break
    return size
