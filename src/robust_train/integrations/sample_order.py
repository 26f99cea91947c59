"""Gives a framework's loader an order of samples that a resumed run can continue anywhere.

A shuffling loader draws its order from torch's global generator, which dropout also uses. Here the
order depends only on the seed and the epoch, and an epoch can start at any sample. In the attempt's
process, `take_over` changes the loaders of Lightning and accelerate, and `order_of_epochs` changes
the loaders of transformers.
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

    The samples of a step depend only on the product of micro-batch, accumulation and ranks. Samples
    are identified by their position in the epoch's order.

    For example, 4 ranks with a micro-batch of 2 divide an epoch of 13 samples into a step of 8 and
    a step of 5. The step of 8 gives each rank 2 samples. In the step of 5, one rank gets 2 samples
    and the others get 1. If a rank has fewer micro-batches in a step than other ranks, it gets an
    extra sample without weight, because all ranks must take part in the same number of collectives.

    Attributes:
        micro_batch: samples of one rank in a forward and backward pass.
        accumulation: micro-batches of one rank in a step.
        rank: this rank.
        ranks: the number of ranks.
    """

    micro_batch: int
    accumulation: int = 1
    rank: int = 0
    ranks: int = 1

    @property
    def at_once(self) -> int:
        """Samples in one micro-batch of all ranks together."""
        return self.micro_batch * self.ranks

    @property
    def of_rank(self) -> int:
        """Samples of one rank in a step."""
        return self.micro_batch * self.accumulation

    @property
    def effective(self) -> int:
        """Samples in a step on all ranks together. An epoch's last step may have fewer."""
        return self.at_once * self.accumulation

    def steps(self, length: int, start: int = 0) -> Iterator[range]:
        """Yield each step's samples, from ``start`` to the end of an epoch of ``length`` samples.

        The first step is shorter if the samples before ``start`` were trained with another
        effective batch size. Frameworks end a step after a multiple of ``accumulation``
        micro-batches, counted from the start of the epoch.
        """
        before = self.micro_batches(range(length)) - self.micro_batches(range(start, length))
        count = self.accumulation - before % self.accumulation
        while start < length:
            stop = min(start + count * self.at_once, length)
            yield range(start, stop)
            start = stop
            count = self.accumulation

    def micro_batches(self, samples: Sequence[int]) -> int:
        """Return how many micro-batches each rank needs for ``samples``."""
        return -(-len(samples) // self.at_once)

    def share(self, step: range) -> list[int]:
        """Return this rank's samples of a step. The last sample may have no weight."""
        samples = list(share_of(step, self.rank, self.ranks))
        micro_batches = -(-len(samples) // self.micro_batch)
        if micro_batches < self.micro_batches(step):
            samples.append(step[0])
        return samples

    def weight(self, step: range, number: int) -> float:
        """Return the factor for the mean loss of micro-batch ``number`` (from 0) of a step.

        The framework divides the loss by the accumulation and averages the gradients over the
        ranks. The factor is 1 except in a short or uneven step, such as an epoch's last step.
        """
        share = share_of(step, self.rank, self.ranks)
        left = max(len(share) - number * self.micro_batch, 0)
        samples = min(left, self.micro_batch)
        return samples * self.accumulation * self.ranks / len(step)


_ALONE = StepShares(micro_batch=1)


class SampleOrder(Sampler[Any]):
    """Yields another sampler's indices, in an order that depends only on the seed and the epoch.

    Args:
        sampler: the sampler that is replaced.
        seed: the job's seed.
        limit: the number of samples in an epoch, None for all.
        generator: the generator from which the loader draws its workers' seeds. It is seeded from
            ``seed`` and the epoch too.
        shares: this rank's samples of each optimizer step. Only these are yielded.

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
        """Let the next pass be ``epoch``, counted from 0, without its first ``skip`` samples.

        Each later pass is the next whole epoch.
        """
        self._epoch = epoch
        self._skip = skip
        # A loader draws its workers' seeds before the first sample.
        self._generator.manual_seed(self._seed_of(epoch))

    def __len__(self) -> int:
        """Return the number of samples that this rank has in a whole epoch."""
        whole_steps, rest = divmod(self.samples, self._shares.effective)
        in_last_step = len(self._shares.share(range(rest)))
        return whole_steps * self._shares.of_rank + in_last_step

    def __iter__(self) -> Iterator[Any]:
        indices = self._draw(self._epoch)
        skip = self._skip
        self.begin(self._epoch + 1)
        return iter([indices[position] for position in self._positions(skip)])

    def first(self) -> Any:
        """Return the index of the first sample in the order of the next epoch to be read."""
        return self._draw(self._epoch)[0]

    def _positions(self, start: int) -> Iterable[int]:
        """Return this rank's positions in the epoch's order, from ``start`` on."""
        if self._shares.ranks == 1:
            return range(start, self.samples)
        steps = self._shares.steps(self.samples, start)
        return itertools.chain.from_iterable(self._shares.share(step) for step in steps)

    def _seed_of(self, epoch: int) -> int:
        return (self._seed * 1_000_003 + epoch) % 2**63

    def _draw(self, epoch: int) -> list[Any]:
        """Return the epoch's samples in order, without drawing from the program's generators."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        generator = getattr(self._sampler, "generator", None)
        seed = self._seed_of(epoch)
        before = GeneratorStates()
        seed_everything(seed)
        try:
            if isinstance(generator, torch.Generator):
                # With several ranks, accelerate gives a RandomSampler a generator. Without one, the
                # sampler would draw its seed like this, so the order is the same either way.
                if isinstance(self._sampler, RandomSampler):
                    seed = int(torch.empty((), dtype=torch.int64).random_())
                generator.manual_seed(seed)
            return list(itertools.islice(self._sampler, self.samples))
        finally:
            before.restore()


def _batches_of(loader: Any) -> Any:
    """Return the batch sampler of ``loader``, or None if it is not torch's own."""
    batches: Any = getattr(loader, "batch_sampler", None)
    # With several ranks, accelerate wraps the batch sampler.
    if type(batches).__name__ == "BatchSamplerShard":
        batches = batches.batch_sampler
    return batches if type(batches) is BatchSampler else None


def order_of_epochs(loader: Any, seed: int) -> SampleOrder | None:
    """Make the order of samples depend only on the seed and the epoch.

    The framework itself resumes within an epoch and divides the samples among the ranks.

    Returns:
        The loader's new sampler, or None if the loader has no sampler with a length.
    """
    batches = _batches_of(loader)
    if batches is None or not hasattr(batches.sampler, "__len__"):
        return None
    batches.sampler = SampleOrder(batches.sampler, seed=seed)
    return batches.sampler  # type: ignore[no-any-return]


def take_over(loader: Any, *, name: str, shares: StepShares, seed: int) -> SampleOrder:
    """Replace the sampler of ``loader`` with a `SampleOrder`, and return it.

    With ``drop_last``, an epoch drops the samples of an incomplete last optimizer step. Torch would
    drop an incomplete last micro-batch, so the number of samples would depend on the micro-batch.

    Args:
        loader: a loader whose batches are micro-batches.
        name: the name of the loader in messages.
        shares: the samples of each optimizer step and of this rank.
        seed: the job's seed.

    Raises:
        UserError: ``loader`` is not a plain loader of a map-style data set, or its batch size
            differs from the micro-batch of ``shares``.
    """
    loader = getattr(loader, "base_dataloader", loader)  # accelerate may wrap the loader
    if not isinstance(loader, DataLoader):
        raise UserError(
            f"{name}: is a {type(loader).__name__}; only a torch DataLoader can resume where an "
            "earlier attempt stopped"
        )
    batches = _batches_of(loader)
    sampler: Any = getattr(batches, "sampler", None)
    if batches is None or not hasattr(sampler, "__len__"):
        raise UserError(
            f"{name}: needs a map-style data set and batch_size=…; a custom batch sampler or an "
            "iterable data set cannot be resumed at a sample"
        )
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise UserError(
            f"{name}: its DistributedSampler divides the samples among the ranks, and robust-train "
            "would divide them again, so most would never be read; leave the sampler out"
        )
    if batches.batch_size != shares.micro_batch:
        hint = "create the loader with cfg.training.batch_size"
        if batches.batch_size * shares.ranks == shares.micro_batch:
            hint = (
                f"this is the batch of each of the {shares.ranks} processes, so do not divide it "
                "by their number"
            )
        raise UserError(
            f"{name}: makes batches of {batches.batch_size}, but this attempt uses "
            f"{shares.micro_batch}; {hint}"
        )
    samples = len(sampler)
    limit = samples
    if batches.drop_last:
        limit -= samples % shares.effective
    if not limit:
        raise UserError(
            f"{name}: {samples} samples are too few for a step of {shares.effective} with "
            "drop_last; lower training.batch_size or training.gradient_accumulation_steps"
        )
    if loader.generator is None:
        loader.generator = torch.Generator()
    order = SampleOrder(sampler, seed=seed, limit=limit, generator=loader.generator, shares=shares)
    batches.sampler = order
    return order
