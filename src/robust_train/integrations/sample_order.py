"""The order in which a data loader gives its samples, such that a resumed run finds its place.

A loader that shuffles draws its order from torch's global generator, which stands elsewhere in
another process, and whose draws dropout shares. Here the order depends on the seed and the epoch
alone, and an epoch can begin at any sample, whatever the micro-batch is by then.
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
    """What another sampler gives, in an order that depends on seed and epoch alone.

    Args:
        sampler: of a map-style data set; it must have a length.
        seed: of the order.
        limit: samples in an epoch at most; None: all.
        generator: the loader's, which gives its workers their seeds, by seed and epoch too.
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
        """Have the next pass be that of ``epoch`` (from 0), without its first ``skip`` samples.

        Every pass after it is the next epoch's, from its beginning.
        """
        self._epoch, self._skip = epoch, skip
        # a loader draws its workers' seed before it asks for the first sample
        if self._generator is not None:
            self._generator.manual_seed(self._seed_of(epoch))

    def __len__(self) -> int:
        """Samples in a whole epoch."""
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
    """Have ``loader`` give its samples in a :class:`SampleOrder`.

    Where it leaves an incomplete last batch out (``drop_last``), an epoch has the largest multiple
    of ``multiple`` samples, so that its steps do not depend on the micro-batch.

    Args:
        loader: changed in place.
        name: of what made it, for the message.
        batch_size: samples that its batches must have.
        multiple: samples in an optimizer step.
        seed: of the order.

    Raises:
        UserError: it is no plain loader of a map-style data set, or has another batch size.
    """
    # accelerate puts its own around it
    loader = getattr(loader, "base_dataloader", loader)
    if not isinstance(loader, DataLoader):
        raise UserError(
            f"{name}: is a {type(loader).__name__}; only a torch DataLoader can go on where an "
            "earlier attempt stopped"
        )
    batches = loader.batch_sampler
    sampler: Any = getattr(batches, "sampler", None)
    if type(batches) is not BatchSampler or not hasattr(sampler, "__len__"):
        raise UserError(
            f"{name}: needs a map-style data set and batches made by batch_size=…; with a batch "
            "sampler of its own or an iterable data set nobody can tell where to go on"
        )
    if batches.batch_size != batch_size:
        raise UserError(
            f"{name}: makes batches of {batches.batch_size}, but this attempt is to use "
            f"{batch_size}; take it from cfg.training when the loader is made"
        )
    if loader.generator is None:
        loader.generator = torch.Generator()
    samples = len(sampler)
    limit = samples // multiple * multiple if batches.drop_last else samples
    if not limit:
        raise UserError(
            f"{name}: {samples} samples make no step of {multiple} with drop_last; lower "
            "training.batch_size or training.gradient_accumulation_steps"
        )
    order = SampleOrder(sampler, seed=seed, limit=limit, generator=loader.generator)
    batches.sampler = order
    return order
