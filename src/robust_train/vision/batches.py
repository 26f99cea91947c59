"""Which samples make an optimizer step, and in which micro-batches they come.

The place in an epoch is a number of samples. The order depends on seed and epoch alone, so a run
that goes on with smaller micro-batches goes on at the very sample where it stopped.
"""

from __future__ import annotations

import bisect
import itertools
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from robust_train.errors import ConfigError
from robust_train.vision.images import ImageDataset, collate

T = TypeVar("T")

_READ_AT_MOST = 64

Batch = tuple[Tensor, Tensor]
"""Images B×C×H×W and labels B."""


@dataclass(frozen=True)
class BatchPlan:
    """How samples are grouped.

    Attributes:
        num_samples: in the data set.
        micro_batch: samples in one forward and backward pass of one rank.
        accumulation_steps: micro-batches of one rank in one optimizer step.
        seed: of the shuffling; with the epoch it fixes the order.
        ranks: processes that share a step.
        rank: this one.
    """

    num_samples: int
    micro_batch: int
    accumulation_steps: int
    seed: int
    ranks: int = 1
    rank: int = 0

    @property
    def effective_batch(self) -> int:
        """Samples in one optimizer step; the last step of an epoch may have fewer."""
        return self.micro_batch * self.accumulation_steps * self.ranks

    def order(self, epoch: int) -> list[int]:
        """The shuffled sample indices of an epoch."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(self.num_samples, generator=generator).tolist()

    def steps(self, epoch: int, start: int = 0) -> Iterator[list[Sequence[int]]]:
        """An epoch's optimizer steps from sample ``start`` on: of each this rank's micro-batches.

        The samples of a step, and their order, depend on the effective batch alone; each rank has
        a stretch of them, in the last step of an epoch perhaps none.
        """
        order = self.order(epoch)
        for first in range(start, self.num_samples, self.effective_batch):
            group = share_of(order[first : first + self.effective_batch], self.rank, self.ranks)
            yield [group[i : i + self.micro_batch] for i in range(0, len(group), self.micro_batch)]

    def samples_in_step(self, start: int) -> int:
        """Samples of all ranks in the step that begins at sample ``start`` of its epoch."""
        return min(self.effective_batch, self.num_samples - start)

    def steps_left(self, start: int) -> int:
        """Optimizer steps from sample ``start`` to the end of its epoch."""
        return -(-(self.num_samples - start) // self.effective_batch)


def share_of(samples: Sequence[T], rank: int, ranks: int) -> Sequence[T]:
    """The stretch of ``samples`` that ``rank`` has; the first ranks have one more than the last."""
    least, more = divmod(len(samples), ranks)
    start = rank * least + min(rank, more)
    return samples[start : start + least + (rank < more)]


@dataclass(frozen=True)
class Loading:
    """How batches are read.

    Attributes:
        num_workers: processes that decode images; 0 decodes in this one.
        prefetch_factor: batches a worker reads ahead.
        device: where batches will go; for a GPU they are read into pinned memory.
    """

    num_workers: int
    prefetch_factor: int
    device: torch.device

    def batches(
        self, dataset: ImageDataset, micro_batches: Sequence[Sequence[int]], epoch: int
    ) -> Iterator[Batch]:
        """One batch for each of ``micro_batches``, in their order, on the host.

        Workers live as long as the iterator, so that those of training and of validation never
        hold memory at the same time.

        Raises:
            ConfigError: an image cannot be decoded.
        """
        is_cuda = self.device.type == "cuda"
        loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            dataset,
            batch_sampler=[[(epoch, index) for index in chunk] for chunk in micro_batches],
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor if self.num_workers else None,
            pin_memory=is_cuda,
            collate_fn=collate,
            # the loader draws a seed when it starts: not from the generator that dropout uses, or
            # a resumed epoch would differ from an uninterrupted one
            generator=torch.Generator(),
            worker_init_fn=_settle_worker,
        )
        for batch in loader:
            if isinstance(batch, ConfigError):
                raise batch
            yield batch


class StepSamples:
    """The samples of one optimizer step: read when they are needed, kept until it is done.

    Kept on the host, so that a step can be repeated after memory ran out on the device.

    Args:
        batches: read ahead by :class:`Loading`; as many are taken as there are ``sizes``.
        sizes: samples in each of them.
    """

    def __init__(self, batches: Iterator[Batch], sizes: Sequence[int]) -> None:
        self._batches = batches
        self._edges = [0, *itertools.accumulate(sizes)]
        self._read: list[Batch] = []

    def __len__(self) -> int:
        """Samples in the step."""
        return self._edges[-1]

    def part(self, start: int, stop: int) -> Batch:
        """The samples from ``start`` up to ``stop``; nothing is copied within one batch."""
        first = bisect.bisect_right(self._edges, start) - 1
        images, labels = [], []
        for index in range(first, len(self._edges) - 1):
            before, after = self._edges[index : index + 2]
            if before >= stop:
                break
            images_BCHW, labels_B = self._batch(index)
            inside = slice(max(start, before) - before, min(stop, after) - before)
            images.append(images_BCHW[inside])
            labels.append(labels_B[inside])
        if len(images) == 1:
            return images[0], labels[0]
        return torch.cat(images), torch.cat(labels)

    def _batch(self, index: int) -> Batch:
        while len(self._read) <= index:
            self._read.append(next(self._batches))
        return self._read[index]


def read_in_parts(effective_batch: int) -> tuple[int, int]:
    """How to read a step's samples while its micro-batch is not known: (samples, reads).

    Workers read ahead in such parts, so a large effective batch must not be one of them.
    """
    parts = [n for n in range(1, _READ_AT_MOST + 1) if effective_batch % n == 0]
    samples = parts[-1] if 4 * parts[-1] >= min(_READ_AT_MOST, effective_batch) else effective_batch
    return samples, effective_batch // samples


def _settle_worker(worker: int) -> None:
    """Free a new worker process of what it inherited.

    The run's signal handlers are not for it: a terminal's Ctrl-C is the run's affair, and SIGTERM
    is how the loader ends a worker that is stuck. torch's own threads in each of several workers
    would fight for the cores.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)


def in_order(samples: Sequence[int], micro_batch: int) -> list[Sequence[int]]:
    """Micro-batches over samples as they lie: for evaluation."""
    return [samples[i : i + micro_batch] for i in range(0, len(samples), micro_batch)]
