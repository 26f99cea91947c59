"""An order of samples that a resumed run can continue at any position, and each rank's share.

A shuffling loader draws its order from torch's global generator, which dropout shares. Here the
order depends on seed and epoch alone, and an epoch can begin at any sample.

In the process that trains, `take_over` changes the loaders of Lightning and accelerate, and
`order_of_epochs` those of transformers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler

from robust_train.model.errors import UserError
from robust_train.step.rng import GeneratorStates, seed_everything
from robust_train.step.splitting import share_of


@dataclass(frozen=True)
class StepShares:
    """Divides an epoch's samples into optimizer steps, and each step among the ranks.

    How many samples a step has depends only on the product of micro-batch, accumulation and ranks.
    Samples are counted by their position in the epoch's order. A rank with fewer micro-batches in a
    step than the others gets another, of a single sample without weight, because all ranks must
    reach their collectives equally often.
    """

    micro_batch: int  # samples of one rank in one forward and backward pass
    accumulation: int = 1  # micro-batches of one rank in a step
    rank: int = 0
    ranks: int = 1

    @property
    def at_once(self) -> int:
        """Samples in a micro-batch of every rank."""
        return self.micro_batch * self.ranks

    @property
    def each(self) -> int:
        """Samples of a rank in a step."""
        return self.micro_batch * self.accumulation

    @property
    def effective(self) -> int:
        """Samples in a step. An epoch's last step may have fewer."""
        return self.at_once * self.accumulation

    def steps(self, length: int, start: int = 0) -> Iterator[range]:
        """Yield each step's samples, from ``start`` to the end of an epoch of ``length`` samples.

        Frameworks count micro-batches from the start of the epoch. After another effective batch
        size, the first step may therefore be shorter.
        """
        before = self.micro_batches(range(length)) - self.micro_batches(range(start, length))
        count = self.accumulation - before % self.accumulation
        while start < length:
            stop = min(start + count * self.at_once, length)
            yield range(start, stop)
            start = stop
            count = self.accumulation

    def micro_batches(self, samples: Sequence[int]) -> int:
        """Return how many micro-batches on every rank ``samples`` fill."""
        return -(-len(samples) // self.at_once)

    def own(self, step: range) -> list[int]:
        """Return this rank's samples of a step. The last may have no weight."""
        mine = list(share_of(step, self.rank, self.ranks))
        is_short = -(-len(mine) // self.micro_batch) < self.micro_batches(step)
        if is_short:
            mine.append(step[0])
        return mine

    def weight(self, step: range, number: int) -> float:
        """Return the factor for the mean loss of micro-batch ``number`` (from 0) of a step.

        The framework divides the loss by the accumulation and averages the gradients over the
        ranks. The factor is 1 except in a short or uneven step, such as an epoch's last.
        """
        mine = len(share_of(step, self.rank, self.ranks)) - number * self.micro_batch
        samples = min(max(mine, 0), self.micro_batch)
        return samples * self.accumulation * self.ranks / len(step)


_ALONE = StepShares(micro_batch=1)


class SampleOrder(Sampler[Any]):
    """Another sampler's first ``limit`` indices in an order that depends on seed and epoch alone.

    ``generator`` is the loader's, for its workers' seeds, which depend on seed and epoch too. The
    sampler yields only this rank's samples of each optimizer step, according to ``shares``.

    Attributes:
        samples: the number of samples in a whole epoch, on all ranks together.
    """

    def __init__(
        self,
        sampler: Any,
        *,
        seed: int,
        limit: int | None = None,
        generator: torch.Generator | None = None,
        shares: StepShares = _ALONE,
    ) -> None:
        self._sampler = sampler
        self._seed = seed
        self.samples = len(sampler) if limit is None else min(len(sampler), limit)
        self._shares = shares
        self._generator = torch.Generator() if generator is None else generator
        self._epoch = 0
        self._skip = 0
        self.begin(0)

    def begin(self, epoch: int, skip: int = 0) -> None:
        """Set the next pass to ``epoch`` (from 0) without its first ``skip`` samples.

        Every later pass is the next whole epoch.
        """
        self._epoch = epoch
        self._skip = skip
        # a loader draws its workers' seed before the first sample
        self._generator.manual_seed(self._seed_of(epoch))

    def __len__(self) -> int:
        """Return the samples that this rank has in a whole epoch."""
        steps, rest = divmod(self.samples, self._shares.effective)
        return steps * self._shares.each + len(self._shares.own(range(rest)))

    def __iter__(self) -> Iterator[Any]:
        indices = self._draw(self._epoch)
        skip = self._skip
        self.begin(self._epoch + 1)
        return iter([indices[position] for position in self._positions(skip)])

    def first(self) -> Any:
        """Return the index of the first sample of the epoch that comes next."""
        return self._draw(self._epoch)[0]

    def _positions(self, start: int) -> Iterable[int]:
        if self._shares.ranks == 1:
            return range(start, self.samples)
        steps = self._shares.steps(self.samples, start)
        return itertools.chain.from_iterable(self._shares.own(step) for step in steps)

    def _seed_of(self, epoch: int) -> int:
        return (self._seed * 1_000_003 + epoch) % 2**63

    def _draw(self, epoch: int) -> list[Any]:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        generator = getattr(self._sampler, "generator", None)
        seed = self._seed_of(epoch)
        before = GeneratorStates()
        seed_everything(seed)
        try:
            if isinstance(generator, torch.Generator):
                # accelerate adds a generator if there are several ranks; the order stays the same
                if isinstance(self._sampler, RandomSampler):
                    seed = int(torch.empty((), dtype=torch.int64).random_())
                generator.manual_seed(seed)
            return list(itertools.islice(self._sampler, self.samples))
        finally:
            before.restore()


def _batches_of(loader: Any) -> Any:
    """Return the batch sampler of ``loader`` if it is torch's own, otherwise None."""
    batches: Any = getattr(loader, "batch_sampler", None)
    # accelerate wraps it if there are several ranks
    if type(batches).__name__ == "BatchSamplerShard":
        batches = batches.batch_sampler
    return batches if type(batches) is BatchSampler else None


def order_of_epochs(loader: Any, seed: int) -> SampleOrder | None:
    """Make an epoch's samples depend on seed and epoch, for a framework that resumes within an
    epoch.

    Returns None if the loader has no sampler with a length.
    """
    batches = _batches_of(loader)
    if batches is None or not hasattr(batches.sampler, "__len__"):
        return None
    batches.sampler = SampleOrder(batches.sampler, seed=seed)
    return batches.sampler  # type: ignore[no-any-return]


def take_over(loader: Any, *, name: str, shares: StepShares, seed: int) -> SampleOrder:
    """Replace the sampler of ``loader``, which makes micro-batches, with a `SampleOrder`.

    With ``drop_last`` an epoch has only whole optimizer steps, which do not depend on the
    micro-batch.

    Raises:
        UserError: ``loader`` is not a plain loader of a map-style data set, or its batch size is
            not that of ``shares``.
    """
    loader = getattr(loader, "base_dataloader", loader)  # accelerate wraps it
    if not isinstance(loader, DataLoader):
        raise UserError(
            f"{name}: is a {type(loader).__name__}; only a torch DataLoader can resume where an "
            "earlier attempt stopped"
        )
    batches = _batches_of(loader)
    sampler: Any = getattr(batches, "sampler", None)
    if batches is None or not hasattr(sampler, "__len__"):
        raise UserError(
            f"{name}: needs a map-style data set and batches made by batch_size=…; a batch "
            "sampler of its own or an iterable data set cannot be resumed at a sample"
        )
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise UserError(
            f"{name}: a DistributedSampler of your own divides the samples among the ranks, which "
            "are divided here, too: most would never be read; leave it out"
        )
    if batches.batch_size != shares.micro_batch:
        how = "take it from cfg.training when the loader is made"
        if batches.batch_size * shares.ranks == shares.micro_batch:
            how = (
                f"the batch is that of each of the {shares.ranks} processes, so do not divide "
                "it by their number"
            )
        raise UserError(
            f"{name}: makes batches of {batches.batch_size}, but this attempt uses "
            f"{shares.micro_batch}; {how}"
        )
    samples = len(sampler)
    limit = samples // shares.effective * shares.effective if batches.drop_last else samples
    if not limit:
        raise UserError(
            f"{name}: {samples} samples make no step of {shares.effective} with drop_last; lower "
            "training.batch_size or training.gradient_accumulation_steps"
        )
    if loader.generator is None:
        loader.generator = torch.Generator()
    order = SampleOrder(sampler, seed=seed, limit=limit, generator=loader.generator, shares=shares)
    batches.sampler = order
    return order
