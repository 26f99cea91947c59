"""What decisions depend on, and the sizes that a job's batch may be split into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from robust_train.config.placeholders import placeholders_in
from robust_train.config.schema import RobustConfig, TrainingConfig
from robust_train.model.spec import AttemptSpec


@dataclass(frozen=True)
class PolicySettings:
    """What the user asked for, and what is known beside it."""

    config: RobustConfig
    # the requested batch, workers and so on of each rank; its GPUs are left open
    asked: AttemptSpec
    # False if the user's own environment, or WSL, settles it
    may_use_expandable_segments: bool = True
    # the trainer supports `training.gradient_checkpointing`
    can_checkpoint: bool = False
    # micro-batches that earlier launches found, by kind of device
    found_sizes: Mapping[str, int] = field(default_factory=dict)
    # the one that `robust-train run halve-batch` led to in an earlier launch; 0: none
    requested_size: int = 0

    @classmethod
    def of(
        cls, config: RobustConfig, *, expandable_segments: bool = True, **known: Any
    ) -> PolicySettings:
        """Return the settings of a job; ``known`` are fields beside its config."""
        training = config.training
        placeholders = placeholders_in(" ".join(config.trainer.argv or ()))
        # 1 is also what scripts without a batch size have
        is_one = training.batch_size == training.gradient_accumulation_steps == 1
        asked = AttemptSpec(
            gpus=(),
            batch_size=training.batch_size,
            gradient_accumulation_steps=training.gradient_accumulation_steps,
            ranks=config.num_gpus,
            num_workers=training.num_workers,
            prefetch_factor=training.prefetch_factor,
            expandable_segments=expandable_segments,
            has_batch=not (config.is_script and is_one) or "batch_size" in placeholders,
            gradient_checkpointing=training.gradient_checkpointing,
        )
        can_checkpoint = "gradient_checkpointing" in placeholders or config.is_built_in
        return cls(config, asked, **{"can_checkpoint": can_checkpoint, **known})

    @property
    def min_batch_size(self) -> int:
        """No attempt uses a smaller micro-batch."""
        return self.config.min_batch_size

    @property
    def share(self) -> int:
        """Samples of each rank per optimizer step."""
        return self.asked.batch_size * self.asked.gradient_accumulation_steps

    @property
    def cpu_ranks(self) -> int:
        """Processes on the CPU: several only if the user asked for the CPU."""
        is_asked = self.config.device == "cpu" and not self.config.auto_device
        return self.config.num_gpus if is_asked else 1

    def for_ranks(self, ranks: int) -> PolicySettings:
        """Share the same effective batch among another number of processes."""
        asked = self.asked
        if ranks == asked.ranks or not self.config.preserve_effective_batch_size:
            return replace(self, asked=replace(asked, ranks=ranks))
        total = asked.effective_batch_size
        exact = (
            size
            for size in range(asked.batch_size, self.min_batch_size - 1, -1)
            if total % (size * ranks) == 0
        )
        size = next(exact, asked.batch_size)
        asked = asked.with_batch(size, -(-total // (size * ranks)))
        return replace(self, asked=replace(asked, ranks=ranks))

    def fewer_ranks(self, ranks: int) -> tuple[int, ...]:
        """Return the allowed numbers of GPUs below ``ranks``, most first.

        Each divides the effective batch size, where that is to be preserved.
        """
        total, least = self.asked.effective_batch_size, self.config.min_num_gpus
        return tuple(
            fewer
            for fewer in range(ranks - 1, (least or ranks) - 1, -1)
            if not self.config.preserve_effective_batch_size
            or self.for_ranks(fewer).asked.effective_batch_size == total
        )


def settings_of_batch(
    batch_size: int, gradient_accumulation_steps: int = 1, **keys: Any
) -> PolicySettings:
    """Return the settings of a batch outside of a job; ``keys`` are those of the config."""
    training = TrainingConfig(
        batch_size=batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        num_workers=0,
    )
    return PolicySettings.of(RobustConfig(training=training, **keys))


def with_accumulation(settings: PolicySettings, batch_size: int) -> tuple[int, int]:
    """Return ``batch_size`` and the accumulation that makes up the effective batch with it."""
    if not settings.config.preserve_effective_batch_size:
        return batch_size, settings.asked.gradient_accumulation_steps
    return batch_size, -(-settings.share // batch_size)


def next_smaller(settings: PolicySettings, batch_size: int) -> tuple[int, int]:
    """Return the next smaller micro-batch and its accumulation.

    At most half of ``batch_size``, not below ``min_batch_size``; among those the largest divisor
    of a rank's share of the effective batch. Without a divisor in that range the accumulation is
    rounded up, and the effective batch is no longer exact.
    """
    at_most = max(batch_size // 2, settings.min_batch_size)
    if settings.config.preserve_effective_batch_size:
        for candidate in range(at_most, settings.min_batch_size - 1, -1):
            if settings.share % candidate == 0:
                return candidate, settings.share // candidate
    return with_accumulation(settings, at_most)


def sizes(settings: PolicySettings) -> Iterator[tuple[int, int]]:
    """Yield each (micro-batch, accumulation) from the requested one to ``min_batch_size``."""
    size = settings.asked.batch_size, settings.asked.gradient_accumulation_steps
    yield size
    while size[0] > settings.min_batch_size:
        size = next_smaller(settings, size[0])
        yield size


def largest_up_to(settings: PolicySettings, at_most: float) -> tuple[int, int]:
    """Return the largest of :func:`sizes` that is no larger, else the smallest."""
    every = list(sizes(settings))
    return next((size for size in every if size[0] <= at_most), every[-1])
