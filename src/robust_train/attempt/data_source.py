"""How a loader draws its samples, as far as its attributes show, and how to count and cut batches.

:mod:`.data_position` uses this module in the process that trains. Nothing here draws a sample or a
random number.
"""

from __future__ import annotations

import contextlib
import sys
import zlib
from dataclasses import dataclass
from typing import Any

_REPEATABLE = frozenset({"builtins", "robust_train", "torch", "torchdata"})
"""Packages whose samplers draw the same order for any batch size."""


@dataclass(frozen=True)
class Source:
    """How a loader draws its samples, as far as its attributes show."""

    # Samples in each batch, None if the loader does not say.
    size: int | None = None
    total: int | None = None  # samples in a pass, None if unknown
    # Whether an incomplete last batch is dropped.
    drops_last: bool = False
    # Why another batch size may change the order of samples, for example "made by a MySampler".
    # None if it cannot.
    unsure: str | None = None
    # Workers that deliver batches in turn, each with its own samples.
    workers: int = 1
    # A checksum of the state that a shuffled order depends on.
    order: int | None = None
    remedy: str = ""  # the change that makes the order the same in all attempts

    def count(self, batch: Any, samples: int | None) -> int | None:
        """Return the number of samples in a batch that comes after ``samples`` samples, None if
        unknown."""
        if self.size is None:
            return count_samples(batch)
        if self.total and samples is not None:
            # The last batch may have fewer samples; some loaders start again after it.
            return min(self.size, self.total - samples % self.total)
        return self.size


def examine_loader(loader: Any) -> Source:
    """Return how ``loader`` draws its samples."""
    data = sys.modules.get("torch.utils.data")
    if data is None or not isinstance(loader, data.DataLoader):
        size = getattr(loader, "batch_size", None)
        has_size = isinstance(size, int) and size > 0
        return Source(size if has_size else None, unsure=_made_by(loader))
    is_stream = isinstance(loader.dataset, data.IterableDataset)
    batches = loader.batch_sampler
    if batches is None and not is_stream:
        # A data set that takes the indices of a whole batch has a sampler of batches.
        batches = loader.sampler
    size = loader.batch_size
    if size is None and type(batches) is data.BatchSampler:
        size = batches.batch_size
    if size is None:
        maker = loader.dataset if loader.batch_sampler is None else batches
        return Source(unsure=_made_by(maker))
    if is_stream:
        workers = max(loader.num_workers, 1)
        unsure = f"loaded by {workers} in turn" if workers > 1 else None
        return Source(size, workers=workers, unsure=unsure)
    sampler = batches.sampler if loader.batch_size is None else loader.sampler
    package = type(sampler).__module__.partition(".")[0]
    drops_last = getattr(batches, "drop_last", False)
    if package not in _REPEATABLE:
        return Source(size, drops_last=drops_last, unsure=_made_by(sampler))
    total = len(sampler) if hasattr(sampler, "__len__") else None
    order, remedy = _order_of(sampler)
    return Source(size, total=total, drops_last=drops_last, order=order, remedy=remedy)


def _made_by(maker: object) -> str:
    return f"made by a {type(maker).__name__}"


def _order_of(sampler: Any) -> tuple[int | None, str]:
    """Return a checksum of the state by which a torch sampler shuffles, and how to make that state
    the same in all attempts."""
    import torch

    is_distributed = getattr(sampler, "shuffle", False)
    if is_distributed:
        seeds = f"{sampler.seed} {sampler.epoch}".encode()
        return zlib.crc32(seeds), "call the sampler's set_epoch(epoch) before"
    if not hasattr(sampler, "generator"):
        return None, ""
    generator = sampler.generator or torch.default_generator
    state = generator.get_state().numpy().tobytes()
    remedy = "seed the loader's generator with the epoch before"
    return zlib.crc32(state), remedy


def count_samples(batch: Any) -> int | None:
    """Return the number of samples in a loaded batch, None if it cannot be counted."""
    # Graph batches and tensor dictionaries have the number as an attribute.
    for name in ("num_graphs", "batch_size"):
        size = getattr(batch, name, None)
        if isinstance(size, tuple) and size:
            size = size[0]
        if isinstance(size, int):
            return size
    # A program without torch should not have to import it.
    if "torch" not in sys.modules:
        return None
    from robust_train.step.splitting import length_of

    with contextlib.suppress(TypeError, ValueError):
        return length_of(batch)
    return None


def cut_first_samples(batch: Any, samples: int, sizes: range) -> Any:
    """Return a batch without its first samples.

    Returns:
        None if the batch cannot be cut, or if its length is not in ``sizes``: it then counts
            something other than samples.
    """
    if "torch" not in sys.modules:
        return None
    from robust_train.step.splitting import length_of, part_of

    with contextlib.suppress(TypeError, ValueError):
        length = length_of(batch)
        rest = part_of(batch, samples, length)
        is_cut = length_of(rest) == length - samples
        if is_cut and length in sizes:
            return rest
    return None
