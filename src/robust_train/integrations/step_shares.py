"""Which samples of an epoch make an optimizer step, and which of them a rank has. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from robust_train.step.splitting import share_of


@dataclass(frozen=True)
class StepShares:
    """Optimizer steps whose samples depend on the product of the numbers below alone.

    Samples are counted by their position in the epoch's order. A rank with fewer micro-batches in a
    step than the others has one more, of a single sample without weight: all ranks have to come to
    their collectives equally often.
    """

    micro_batch: int  # samples of one rank in one forward and backward pass
    accumulation: int = 1  # micro-batches of one rank in a step
    rank: int = 0
    ranks: int = 1

    @property
    def at_once(self) -> int:
        """Samples in one micro-batch of every rank."""
        return self.micro_batch * self.ranks

    @property
    def each(self) -> int:
        """Samples of one rank in a step."""
        return self.micro_batch * self.accumulation

    @property
    def effective(self) -> int:
        """Samples in a step; an epoch's last one may have fewer."""
        return self.at_once * self.accumulation

    def steps(self, length: int, start: int = 0) -> Iterator[range]:
        """Yield each step's samples, from ``start`` to the end of an epoch of ``length`` samples.

        Frameworks step when so many micro-batches of the epoch are done: if another effective batch
        size came before, the first step is shorter.
        """
        before = self.micro_batches(range(length)) - self.micro_batches(
            range(start, length)
        )
        count = self.accumulation - before % self.accumulation
        while start < length:
            stop = min(start + count * self.at_once, length)
            yield range(start, stop)
            start, count = stop, self.accumulation

    def micro_batches(self, samples: Sequence[int]) -> int:
        """Return how many micro-batches of every rank ``samples`` make."""
        return -(-len(samples) // self.at_once)

    def own(self, step: range) -> list[int]:
        """Return what this rank reads of a step; the last may be there without weight."""
        mine = list(share_of(step, self.rank, self.ranks))
        is_short = -(-len(mine) // self.micro_batch) < self.micro_batches(step)
        return [*mine, step[0]] if is_short else mine

    def weight(self, step: range, number: int) -> float:
        """Return the factor for the mean loss of micro-batch ``number`` (from 0) of a step.

        The framework divides it by the accumulation and averages the gradients over the ranks. It
        is 1 except in a step that is short or uneven, as an epoch's last one may be.
        """
        mine = len(share_of(step, self.rank, self.ranks)) - number * self.micro_batch
        samples = min(max(mine, 0), self.micro_batch)
        return samples * self.accumulation * self.ranks / len(step)
