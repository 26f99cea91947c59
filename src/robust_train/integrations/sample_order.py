"""An order of samples that a resumed run can continue at any position.

A shuffling loader draws its order from torch's global generator, which dropout shares. Here the
order depends on seed and epoch alone, and an epoch can begin at any sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

from robust_train.errors import UserError
from robust_train.microbatch.rng import GeneratorStates, seed_everything


class SampleOrder(Sampler[Any]):
    """Another sampler's first ``limit`` indices in an order that depends on seed and epoch alone.

    ``generator`` is the loader's, for its workers' seeds; they depend on seed and epoch too.
    """

    def __init__(
        self,
        sampler: Any,
        *,
        seed: int,
        limit: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._sampler = sampler
        self._seed = seed
        self._length = len(sampler) if limit is None else min(len(sampler), limit)
        self._generator = generator
        self.begin(0)

    def begin(self, epoch: int, skip: int = 0) -> None:
        """Set the next pass to ``epoch`` (from 0) without its first ``skip`` samples.

        Every later pass is the next whole epoch.
        """
        self._epoch, self._skip = epoch, skip
        # a loader draws its workers' seed before the first sample
        if self._generator is not None:
            self._generator.manual_seed(self._seed_of(epoch))

    def __len__(self) -> int:
        """Return the samples in a whole epoch."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        indices = self._draw(self._epoch)[self._skip : self._length]
        self.begin(self._epoch + 1)
        return iter(indices)

    def _seed_of(self, epoch: int) -> int:
        return (self._seed * 1_000_003 + epoch) % 2**63

    def _draw(self, epoch: int) -> list[Any]:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        own = getattr(self._sampler, "generator", None)
        if isinstance(own, torch.Generator):
            own.manual_seed(self._seed_of(epoch))
        before = GeneratorStates()
        seed_everything(self._seed_of(epoch))
        try:
            return list(itertools.islice(self._sampler, self._length))
        finally:
            before.restore()


def take_over(loader: Any, *, name: str, batch_size: int, multiple: int, seed: int) -> SampleOrder:
    """Replace the sampler of ``loader``, which must have ``batch_size``, by a :class:`SampleOrder`.

    With ``drop_last`` an epoch has the largest multiple of ``multiple`` (the samples in an
    optimizer step), so its steps do not depend on the micro-batch.

    Raises:
        UserError: it is no plain loader of a map-style data set, or has another batch size.
    """
    loader = getattr(loader, "base_dataloader", loader)  # accelerate wraps it
    if not isinstance(loader, DataLoader):
        raise UserError(
            f"{name}: is a {type(loader).__name__}; only a torch DataLoader can resume where an "
            "earlier attempt stopped"
        )
    batches = loader.batch_sampler
    sampler: Any = getattr(batches, "sampler", None)
    if type(batches) is not BatchSampler or not hasattr(sampler, "__len__"):
        raise UserError(
            f"{name}: needs a map-style data set and batches made by batch_size=…; a batch "
            "sampler of its own or an iterable data set cannot be resumed at a sample"
        )
    if batches.batch_size != batch_size:
        raise UserError(
            f"{name}: makes batches of {batches.batch_size}, but this attempt uses "
            f"{batch_size}; take it from cfg.training when the loader is made"
        )
    samples = len(sampler)
    limit = samples // multiple * multiple if batches.drop_last else samples
    if not limit:
        raise UserError(
            f"{name}: {samples} samples make no step of {multiple} with drop_last; lower "
            "training.batch_size or training.gradient_accumulation_steps"
        )
    if loader.generator is None:
        loader.generator = torch.Generator()
    order = SampleOrder(sampler, seed=seed, limit=limit, generator=loader.generator)
    batches.sampler = order
    return order
