"""Splits a batch of any structure into parts along its first dimension, and joins their results.

The batcher, the engine and the integrations use this module in the process that trains. The first
functions count and cut the samples of any batch. `join_parts` joins the results of the parts, and
:class:`Parts` is a batch with the functions that split it. :mod:`.micro_batch_size` chooses the
size of the parts.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence

from robust_train.compat import version_of
from robust_train.memory.nesting import DESCEND, rebuild

T = TypeVar("T")

Length = Callable[[Any], int]
"""Returns the number of samples in a batch."""

Split = Callable[[Any, int, int], Any]
"""``split(batch, start, stop)`` returns the samples from ``start`` to ``stop - 1``."""

Count = Callable[[Any], "float | torch.Tensor"]
"""Returns the number of items (samples, tokens, unmasked positions) that a loss averages over."""


# --- counting and cutting samples ---


def bounds(samples: int, at_most: int, start: int = 0, *, least: int = 1) -> list[tuple[int, int]]:
    """Split the samples from ``start`` up to ``samples`` into as few parts as possible.

    The parts have equal sizes, or sizes that differ by 1, because such parts need the least memory.
    If the batch has at least ``least`` samples, so has each part, because BatchNorm refuses a
    single sample. A part may then exceed ``at_most`` by 1.

    Returns:
        The start and the stop of each part, as in a slice.
    """
    count = samples - start
    parts = -(-count // at_most)
    if parts > 1:
        parts = max(min(parts, count // least), 1)
    edges = [start + count * i // parts for i in range(parts + 1)] if parts else []
    return list(itertools.pairwise(edges))


def share_of(samples: Sequence[T], rank: int, ranks: int) -> Sequence[T]:
    """Return the samples for ``rank``. The first ranks may get one sample more than the others."""
    least, more = divmod(len(samples), ranks)
    start = rank * least + min(rank, more)
    length = least + 1 if rank < more else least
    return samples[start : start + length]


def length_of(batch: Any, *, is_strict: bool = False) -> int:
    """Return the number of samples: the first dimension of the tensors, or a list's length.

    Args:
        is_strict: refuse a batch that contains numbers, or arrays without dimensions, because they
            may describe all samples.

    Raises:
        TypeError: the batch has no tensor, array or list of samples.
        ValueError: its tensors differ in their first dimension.
    """
    lengths: list[tuple[str, int]] = []

    def add_length(item: Any, name: str) -> Any:
        if isinstance(item, PackedSequence):  # Its first dimension is time.
            raise TypeError(
                "cannot count the samples of a PackedSequence: give length=… and split=…, or pack "
                "in the function"
            )
        if _has_samples(item):
            lengths.append((name, len(item)))
        elif is_strict and (_is_array(item) or type(item) in (int, float)):
            lengths.append((name, 0))
        else:
            return DESCEND
        return item

    rebuild(batch, add_length)
    if not lengths:
        raise TypeError(
            f"cannot count the samples of a {type(batch).__name__}: it holds no tensor, array or "
            "list; give length=… and split=…"
        )
    if len({length for _, length in lengths}) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths)
        raise ValueError(f"cannot count the samples: {listed}; give length=… and split=…")
    return lengths[0][1]


def part_of(batch: Any, start: int, stop: int) -> Any:
    """Return the samples from ``start`` to ``stop - 1``, in the structure of ``batch``.

    Tensors and arrays are sliced, which copies nothing. Mappings, tuples and dataclasses are
    rebuilt around their parts. In a list of tensors or arrays, which a loader makes from a tuple,
    each entry is sliced. Any other list is sliced as a list of samples. Other values stay as they
    are. A list with a tensor for each sample looks like a list from a loader, so such a batch needs
    the user's own ``split`` and ``length``.
    """

    def cut(item: Any, name: str) -> Any:
        if not _has_samples(item):
            return DESCEND
        if getattr(item, "is_sparse", False):  # torch cannot slice a sparse tensor.
            return item.narrow_copy(0, start, stop - start)
        return item[start:stop]

    return rebuild(batch, cut)


def part_of_both_ends(batch: Any, samples: int, size: int) -> Any:
    """Return ``size`` samples, half from the start of ``batch`` and half from its end.

    If the batch is sorted by class or by length, the two halves differ as much as possible.
    """
    if size >= samples:
        return part_of(batch, 0, samples)
    first = part_of(batch, 0, size // 2)
    last = part_of(batch, samples - (size - size // 2), samples)
    return _concatenate(first, last)


def _concatenate(first: Any, last: Any) -> Any:
    """Join two parts of a batch into a part with the samples of both."""
    last_by_name: dict[str, Any] = {}

    def keep(item: Any, name: str) -> Any:
        if not _has_samples(item):
            return DESCEND
        last_by_name[name] = item
        return item

    def join(item: Any, name: str) -> Any:
        if not _has_samples(item):
            return DESCEND
        other = last_by_name[name]
        if isinstance(item, torch.Tensor):
            return torch.cat([item, other])
        if isinstance(item, list):
            return item + other
        return importlib.import_module("numpy").concatenate([item, other])

    rebuild(last, keep)
    return rebuild(first, join)


# --- joining results ---


def join_parts(results: Sequence[Any], sizes: Sequence[int], *, any_length: bool = False) -> Any:
    """Join the results of parts into the result of the batch.

    Arrays and lists with an entry for each sample are concatenated. Floats are averaged, weighted
    by the samples, and integers are summed. Any other value is taken from the first part.

    Args:
        results: the result of each part, in any structure that `part_of` accepts.
        sizes: the number of samples in each part.
        any_length: arrays and lists need not have an entry for each sample.

    Raises:
        ValueError: the results do not fit together.
    """
    first = results[0]
    if len(results) == 1:
        return first
    join = partial(join_parts, sizes=sizes, any_length=any_length)
    has_entries = _is_array(first) and len(first.shape) > 0
    lengths: Sequence[int] = sizes
    if not any_length and (has_entries or isinstance(first, list)):
        lengths = [len(result) for result in results]
    has_an_entry_per_sample = list(lengths) == list(sizes)
    if has_entries:
        shapes = [tuple(result.shape) for result in results]
        if not has_an_entry_per_sample or len({shape[1:] for shape in shapes}) > 1:
            raise ValueError(f"they have shapes {shapes}")
        return torch.cat([torch.as_tensor(result) for result in results])
    if _is_array(first) or type(first) in (int, float):
        return _join_numbers(results, sizes)
    if isinstance(first, Mapping):
        content = {}
        for key in first:
            content[key] = join([result[key] for result in results])
        if type(first) is dict:
            return content
        return type(first)(content)  # type: ignore[call-arg]
    if isinstance(first, list) and has_an_entry_per_sample:
        return list(itertools.chain.from_iterable(results))
    if isinstance(first, (list, tuple)):
        make: Any = getattr(first, "_make", type(first))
        return make(map(join, zip(*results, strict=True)))
    return first


def _join_numbers(numbers: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Average floats, weighted by ``sizes``, and sum integers. For booleans, return the first."""
    dtype = torch.as_tensor(numbers[0]).dtype
    if dtype == torch.bool:
        return numbers[0]
    if not (dtype.is_floating_point or dtype.is_complex):
        return sum(numbers[1:], numbers[0])
    weighted = (number * size for number, size in zip(numbers, sizes, strict=True))
    return sum(weighted) / sum(sizes)


# --- a batch with its rules for splitting ---


@dataclass(frozen=True)
class Part:
    """Consecutive samples of a batch, in the batch's structure."""

    data: Any
    weight: float  # the weight of its mean loss in the mean loss of the batch
    start: int = 0  # position of its first sample in the batch
    stop: int = 0  # position after its last sample
    of: int = 0  # number of samples in the batch

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        """Whether the part has the last sample of the batch."""
        return self.stop == self.of

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole batch."""
        return self.is_last and not self.start


@dataclass
class Parts:
    """A batch that can be split."""

    batch: Any  # any structure
    samples: int  # number of samples
    split: Split = part_of
    # Returns the number of items that a loss averages over. None if the items are the samples.
    count: Count | None = None
    # False if the batch certainly has items. They are then counted only if the batch is split.
    counts_whole: bool = True

    @classmethod
    def of(
        cls, batch: Any, length: Length | None, split: Split | None, count: Count | None = None
    ) -> Parts:
        """Return a user's batch, with the user's functions if they are given."""
        if not length:
            length = len if split else length_of
        return cls(batch, length(batch), split or part_of, count)

    def __post_init__(self) -> None:
        # A pass may replace tensors in the batch, so the original tensors are listed now.
        self._tensors = _versions_in(self.batch)

    @property
    def has_changed(self) -> bool:
        """Whether a tensor of the original batch has been changed in place."""
        return any(version_of(tensor) != version for tensor, version in self._tensors)

    @functools.cached_property
    def items(self) -> float:
        """The number of items that the loss over the whole batch averages over."""
        if self.count is None:
            return float(self.samples)
        return float(self.count(self.batch))

    def part(self, start: int, stop: int, *, factor: float = 1.0) -> Part:
        """Return the samples from ``start`` to ``stop - 1``, with ``factor`` times their weight.

        If the part is the whole batch, its data is the batch itself and not a copy.
        """
        is_whole = (start, stop) == (0, self.samples)
        data = self.batch
        if not is_whole or self.split is not part_of:
            data = self.split(data, start, stop)
        if is_whole:
            has_items = not self.counts_whole or self.items != 0
            share = 1.0 if has_items else 0.0
        else:
            items = stop - start if self.count is None else float(self.count(data))
            share = items / self.items if self.items else 0.0
        return Part(data, factor * share, start, stop, self.samples)

    def without_weight(self) -> Part:
        """Return a part with weight 0, for a rank that has to join the other ranks' collectives."""
        return Part(self.part(0, 1).data, 0.0)


def _versions_in(batch: Any) -> list[tuple[Any, int]]:
    """Return the tensors and arrays in a batch, each with a number that counts its changes."""
    versions: list[tuple[Any, int]] = []

    def add_version(item: Any, name: str) -> Any:
        if not _has_samples(item):
            return DESCEND
        versions.append((item, version_of(item)))
        return item

    rebuild(batch, add_version)
    return versions


# --- the values in a batch ---


def _is_array(item: Any) -> bool:
    if isinstance(item, torch.Tensor):
        return True
    return hasattr(item, "__array__") and hasattr(item, "shape") and hasattr(item, "dtype")


def _has_samples(item: Any) -> bool:
    if _is_array(item):
        return len(item.shape) > 0
    return isinstance(item, list) and not _is_structure(item)


def _is_structure(items: Iterable[Any]) -> bool:
    """Return whether a list contains arrays, at any depth. A loader makes such a list from a tuple.
    Any other list is a list of samples."""
    return any(
        _is_array(item)
        or (isinstance(item, Mapping) and _is_structure(item.values()))
        or (isinstance(item, (tuple, list)) and _is_structure(item))
        for item in items
    )
