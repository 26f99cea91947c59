"""The settings on which decisions depend: the config, the requested batch and the trainer.

The launcher makes a `PolicySettings` for each job, and passes it to each decision. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from robust_train.config.placeholders import placeholders_in
from robust_train.config.schema import CHECKPOINTING, RobustConfig
from robust_train.model.events import BatchTaken, Event, TrainerSupports
from robust_train.model.parts import parts_like
from robust_train.model.spec import AttemptSpec, Knob
from robust_train.policy.sizes import next_smaller


@dataclass(frozen=True)
class PolicySettings:
    """The user's settings, and the facts about the trainer and its environment."""

    config: RobustConfig
    # The requested batch, workers and other values of each rank, without GPUs.
    asked: AttemptSpec
    # False if the user's environment decides, or on WSL.
    may_use_expandable_segments: bool = True
    # Whether the trainer supports `training.gradient_checkpointing`.
    can_checkpoint: bool = False

    @classmethod
    def of(
        cls,
        config: RobustConfig,
        *,
        environ: Mapping[str, str] = MappingProxyType({}),
        used: Collection[str] | None = None,
        **more: Any,
    ) -> PolicySettings:
        """Return the settings of a job.

        Args:
            config: the job's config.
            environ: the job's environment.
            used: the values of an attempt that reach its script. None stands for the placeholders
                in its command.
            more: values of other fields.
        """
        training = config.training
        traits = config.traits
        requested = AttemptSpec(
            gpus=(),
            batch_size=training.batch_size,
            gradient_accumulation_steps=training.gradient_accumulation_steps,
            ranks=config.num_gpus,
            has_batch=traits.has_batch,
            accumulates=traits.accumulates,
        )
        requested = requested.having(*(kind.asked(config, environ) for kind in parts_like(Knob)))
        has_key = CHECKPOINTING in (config.theirs or ())
        more.setdefault("can_checkpoint", config.is_built_in or has_key)
        settings = cls(config, requested, **more)
        if not traits.is_program:
            return settings
        if used is None:
            used = placeholders_in(" ".join(config.trainer.argv or ()))
        return settings.supporting(used)

    def after(self, event: Event) -> PolicySettings:
        """Return the settings after an event of an attempt: the values that its trainer supports,
        or the batch that its trainer requested."""
        match event:
            case TrainerSupports():
                return self.supporting(event.features)
            case BatchTaken():
                return replace(self, asked=self.asked.with_batch(event.asked, None))
        return self

    def supporting(self, features: Collection[str]) -> PolicySettings:
        """Return the settings for a trainer that reads these values of an attempt."""
        return replace(
            self,
            asked=self.asked.supporting(features),
            can_checkpoint=self.can_checkpoint or "gradient_checkpointing" in features,
        )

    @property
    def min_batch_size(self) -> int:
        """The smallest micro-batch that any attempt uses."""
        return self.config.min_batch_size

    @property
    def accumulates(self) -> bool:
        """Whether accumulation makes up for a smaller micro-batch."""
        is_off = self.config.preserve_effective_batch_size is False
        return self.asked.accumulates and not is_off

    def refuses(self, spec: AttemptSpec) -> bool:
        """Return whether the user rules out attempts with this effective batch or loss."""
        if self.config.preserve_effective_batch_size is not True:
            return False
        has_other_batch = spec.effective_batch_size != self.asked.effective_batch_size
        return has_other_batch or bool(spec.noted("splits_loss", False))

    @property
    def share(self) -> int:
        """Samples of each rank per optimizer step."""
        return self.asked.batch_size * self.asked.gradient_accumulation_steps

    @property
    def cpu_ranks(self) -> int:
        """Number of processes on the CPU: several only if the user chose the CPU as the device."""
        is_chosen = self.config.device == "cpu" and not self.config.picks_gpu
        return self.config.num_gpus if is_chosen else 1

    def for_ranks(self, ranks: int) -> PolicySettings:
        """Return the settings for another number of processes, which share the same effective
        batch."""
        requested = self.asked
        if ranks != requested.ranks and self.accumulates:
            total = requested.effective_batch_size
            size = self._exact_size_for(ranks)
            requested = requested.with_batch(size, math.ceil(total / (size * ranks)))
        return replace(self, asked=replace(requested, ranks=ranks))

    def _exact_size_for(self, ranks: int) -> int:
        """Return the largest micro-batch with which this many ranks share the effective batch
        exactly, or the requested micro-batch if there is none."""
        requested = self.asked
        for size in range(requested.batch_size, self.min_batch_size - 1, -1):
            if requested.effective_batch_size % (size * ranks) == 0:
                return size
        return requested.batch_size

    def resize(self, spec: AttemptSpec, batch_size: int) -> AttemptSpec:
        """Return ``spec`` with another micro-batch, and the accumulation that keeps the effective
        batch."""
        accumulation = self.asked.gradient_accumulation_steps
        if self.accumulates:
            accumulation = math.ceil(self.share / batch_size)
        return spec.with_batch(batch_size, accumulation)

    def exact_size(self, at_most: int) -> int:
        """Return the largest micro-batch up to ``at_most`` that divides a rank's samples, or
        ``at_most`` if there is none.

        An attempt that repeats a step in parts need not divide the samples, so the next attempt may
        have to start with a smaller size.
        """
        for size in range(at_most, self.min_batch_size - 1, -1):
            if self.share % size == 0:
                return size
        return at_most

    def next_smaller(self, batch_size: int) -> int:
        """Return the next smaller micro-batch of a rank."""
        share = self.share if self.accumulates else 0
        return next_smaller(batch_size, self.min_batch_size, share)

    def fewer_ranks(self, ranks: int) -> tuple[int, ...]:
        """Return the allowed numbers of GPUs below ``ranks``, largest first.

        Each keeps the effective batch size exactly. If the trainer cannot accumulate, any number is
        allowed, unless the user insists on the effective batch size.
        """
        total = self.asked.effective_batch_size
        least = self.config.chosen("min_num_gpus") or ranks
        may_change = not self.accumulates and self.config.preserve_effective_batch_size is not True
        allowed: list[int] = []
        for fewer in range(ranks - 1, least - 1, -1):
            is_kept = self.for_ranks(fewer).asked.effective_batch_size == total
            if is_kept or may_change:
                allowed.append(fewer)
        return tuple(allowed)


def list_sizes(settings: PolicySettings) -> list[int]:
    """Return the micro-batches from the requested size down to ``min_batch_size``."""
    size = settings.asked.batch_size
    sizes = [size]
    while settings.asked.has_batch and size > settings.min_batch_size:
        size = settings.next_smaller(size)
        sizes.append(size)
    return sizes


def largest_up_to(settings: PolicySettings, at_most: float) -> int:
    """Return the largest size up to ``at_most``, or the smallest size if all sizes are larger."""
    sizes = list_sizes(settings)
    for size in sizes:
        if size <= at_most:
            return size
    return sizes[-1]
