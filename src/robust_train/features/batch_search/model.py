"""The plan of a search for the micro-batch: the sizes to choose from, and the memory to use.

`batch_search.attempt` makes the plan in the process that trains. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from robust_train.config.schema import RobustConfig
from robust_train.model.spec import AttemptSpec
from robust_train.policy.sizes import exact_sizes


@dataclass(frozen=True)
class SearchPlan:
    """The limits within which a search looks for the largest micro-batch that fits."""

    # Samples of an optimizer step, the upper limit of the micro-batch.
    effective_batch_size: int
    min_batch_size: int = 1  # the lower limit of the micro-batch
    # The share of the device's memory to use at most, above 0 and up to 1.
    memory_share: float = 1.0

    @classmethod
    def of(cls, config: RobustConfig, spec: AttemptSpec) -> SearchPlan:
        """Return the plan of an attempt."""
        return cls(
            spec.batch_size * spec.gradient_accumulation_steps,
            config.min_batch_size,
            config.memory.fraction / config.gpu_jobs_per_device,
        )

    def sizes(self, samples: int) -> tuple[int, ...]:
        """Return the micro-batches to choose from, smallest first. Empty if the batch has fewer
        samples than the smallest."""
        sizes = exact_sizes(self.effective_batch_size, self.min_batch_size)
        return tuple(size for size in sizes if size <= samples)
