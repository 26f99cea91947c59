"""Group samples into optimizer steps and micro-batches, and read them.

The position in an epoch is a number of samples, and their order depends on seed and epoch alone: a
run resumes at the very sample where it stopped, also with smaller micro-batches.
"""

from __future__ import annotations

import bisect
import itertools
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from robust_train.model.errors import ConfigError
from robust_train.step.splitting import share_of
from robust_train.vision.images import ImageDataset, collate

_READ_AT_MOST = 64

Batch = tuple[Tensor, Tensor]  # Images B×C×H×W and labels B


@dataclass(frozen=True)
class BatchPlan:
    """How samples are grouped: ``micro_batch`` samples of one rank in one forward pass, times
    ``accumulation_steps`` times ``ranks`` in an optimizer step; ``seed`` fixes each epoch's order.
    """

    num_samples: int
    micro_batch: int
    accumulation_steps: int
    seed: int
    ranks: int = 1
    rank: int = 0

    @property
    def effective_batch(self) -> int:
        """Return the samples in one optimizer step; an epoch's last step may have fewer."""
        return self.micro_batch * self.accumulation_steps * self.ranks

    def order(self, epoch: int) -> list[int]:
        """Return the shuffled sample indices of an epoch."""
        generator = torch.Generator().manual_seed(
            (self.seed * 1_000_003 + epoch) % 2**63
        )
        return torch.randperm(self.num_samples, generator=generator).tolist()

    def steps(self, epoch: int, start: int = 0) -> Iterator[list[Sequence[int]]]:
        """Yield this rank's micro-batches of each optimizer step from sample ``start`` on. A step's
        samples and their order depend on the effective batch alone. In an epoch's last step a rank
        may have none."""
        order = self.order(epoch)
        for first in range(start, self.num_samples, self.effective_batch):
            group = share_of(
                order[first : first + self.effective_batch], self.rank, self.ranks
            )
            yield in_order(group, self.micro_batch)

    def samples_in_step(self, start: int) -> int:
        """Return how many samples of all ranks the step that begins at ``start`` has."""
        return min(self.effective_batch, self.num_samples - start)

    def steps_left(self, start: int) -> int:
        """Return the optimizer steps from sample ``start`` to the end of its epoch."""
        return -(-(self.num_samples - start) // self.effective_batch)


def in_order(samples: Sequence[int], micro_batch: int) -> list[Sequence[int]]:
    """Split samples into micro-batches without shuffling."""
    return [samples[i : i + micro_batch] for i in range(0, len(samples), micro_batch)]


def read_in_parts(effective_batch: int) -> tuple[int, int]:
    """Return (samples, reads) to read a step with while its micro-batch size is unknown. Workers
    read ahead in such parts, so a large effective batch must not be a single one."""
    samples = max(n for n in range(1, _READ_AT_MOST + 1) if effective_batch % n == 0)
    if 4 * samples < min(_READ_AT_MOST, effective_batch):
        samples = effective_batch
    return samples, effective_batch // samples


@dataclass(frozen=True)
class Loading:
    """Reads batches, with worker processes if ``num_workers`` is not 0; for a GPU into pinned
    memory."""

    num_workers: int
    prefetch_factor: int
    device: torch.device

    def batches(
        self, dataset: ImageDataset, micro_batches: Sequence[Sequence[int]], epoch: int
    ) -> Iterator[Batch]:
        """Yield a batch on the host for each of ``micro_batches``, in order. Workers end with the
        iterator, so those of training and of validation never hold memory at the same time."""
        loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            dataset,
            batch_sampler=[
                [(epoch, index) for index in chunk] for chunk in micro_batches
            ],
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor if self.num_workers else None,
            pin_memory=self.device.type == "cuda",
            collate_fn=collate,
            # the loader draws a seed; from dropout's generator it would change a resumed epoch
            generator=torch.Generator(),
            worker_init_fn=_prepare_worker,
        )
        for batch in loader:
            if isinstance(batch, ConfigError):
                raise batch
            yield batch


def _prepare_worker(worker: int) -> None:
    # the run handles a terminal's Ctrl-C; the loader sends SIGTERM to end a worker that is stuck
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)


class StepSamples:
    """The samples of one optimizer step, read when needed and kept on the host until it is done. So
    a step can be repeated after memory ran out on the device. ``sizes`` are those of the step's
    next ``batches``."""

    def __init__(self, batches: Iterator[Batch], sizes: Sequence[int]) -> None:
        self._batches = batches
        self._edges = [0, *itertools.accumulate(sizes)]
        self._read: list[Batch] = []

    def __len__(self) -> int:
        """Return the samples in the step."""
        return self._edges[-1]

    def part(self, start: int, stop: int) -> Batch:
        """Return samples ``start`` to ``stop``, without a copy if they lie in one batch."""
        first = bisect.bisect_right(self._edges, start) - 1
        after_last = bisect.bisect_left(self._edges, stop)
        while len(self._read) < after_last:
            self._read.append(next(self._batches))
        parts = [
            [tensor[max(start - before, 0) : stop - before] for tensor in batch]
            for before, batch in zip(
                self._edges[first:], self._read[first:after_last], strict=False
            )
        ]
        images, labels = zip(*parts, strict=True)
        if len(parts) == 1:
            return images[0], labels[0]
        return torch.cat(images), torch.cat(labels)
