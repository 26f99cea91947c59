"""Parts of a batch of any shape, along its first dimension."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")

Length = Callable[[Any], int]
"""Number of samples in a batch."""

Split = Callable[[Any, int, int], Any]
"""``split(batch, start, stop)``: the samples from ``start`` up to, without, ``stop``."""

Count = Callable[[Any], "float | torch.Tensor"]
"""How many items (samples, tokens, unmasked positions) the loss over this data is a mean of."""


def bounds(samples: int, at_most: int, start: int = 0) -> list[tuple[int, int]]:
    """Split the samples from ``start`` up to ``samples``: as few parts as may be, even in size.

    Even parts need the least memory, and the last is not a lone sample, which BatchNorm would
    refuse, if there are others to share with.
    """
    count = samples - start
    parts = -(-count // at_most)
    edges = [start + count * i // parts for i in range(parts + 1)] if parts else []
    return list(itertools.pairwise(edges))


def share_of(samples: Sequence[T], rank: int, ranks: int) -> Sequence[T]:
    """Return the slice of ``samples`` for ``rank``; the first ranks may have one more."""
    least, more = divmod(len(samples), ranks)
    start = rank * least + min(rank, more)
    return samples[start : start + least + (rank < more)]


def length_of(batch: Any, *, is_strict: bool = False) -> int:
    """Return the number of samples: the first dimension of the tensors, or a list's length.

    Args:
        is_strict: refuse numbers, and arrays without dimensions, which may be about all samples.

    Raises:
        TypeError: there is no tensor, array or list of samples in it.
        ValueError: they differ in their first dimension.
    """
    lengths = list(_lengths(batch, "batch", is_strict))
    if not lengths:
        raise TypeError(
            f"cannot count the samples of a {type(batch).__name__}: it holds no tensor, array or "
            "list; give length=… and split=…"
        )
    if len({length for _, length in lengths}) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths)
        raise ValueError(
            f"cannot count the samples: {listed}; give length=… and split=…"
        )
    return lengths[0][1]


def part_of(batch: Any, start: int, stop: int) -> Any:
    """Return the samples from ``start`` up to, without, ``stop``, in the structure of ``batch``.

    Tensors and arrays are sliced, which copies nothing; mappings, tuples and dataclasses are built
    again around their parts. A list that holds tensors or arrays, as loaders make of tuples, is
    walked, any other is sliced as a list of samples. The rest goes along as it is. A list with one
    tensor for each sample looks the same as a loader's: for that give functions of your own.
    """
    if _is_array(batch):
        return batch[start:stop] if len(batch.shape) else batch
    if isinstance(batch, Mapping):
        parts = {key: part_of(item, start, stop) for key, item in batch.items()}
        # others, such as transformers' BatchEncoding, are made of a dictionary
        return parts if type(batch) is dict else type(batch)(parts)  # type: ignore[call-arg]
    if isinstance(batch, list) and not _is_structure(batch):
        return batch[start:stop]
    if isinstance(batch, (list, tuple)):
        items = [part_of(item, start, stop) for item in batch]
        if isinstance(batch, list):
            return items
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    if is_dataclass(batch) and not isinstance(batch, type):
        part = copy.copy(batch)
        for entry in fields(batch):
            # also where the class is frozen
            object.__setattr__(
                part, entry.name, part_of(getattr(batch, entry.name), start, stop)
            )
        return part
    return batch


def joined(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Invert :func:`part_of` for what a model gave for the parts.

    Entries for samples are put together, other numbers averaged; of the rest the first part's
    counts. Raises ValueError where the parts do not fit together.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if _is_array(first) and len(first.shape):
        shapes = [tuple(part.shape) for part in parts]
        if shapes != [(size, *first.shape[1:]) for size in sizes]:
            raise ValueError(f"they have shapes {shapes}")
        return torch.cat([torch.as_tensor(part) for part in parts])
    if isinstance(first, float) or (
        _is_array(first) and torch.as_tensor(first).is_floating_point()
    ):
        return sum(part * size for part, size in zip(parts, sizes, strict=True)) / sum(
            sizes
        )
    if isinstance(first, Mapping):
        found = {key: joined([part[key] for part in parts], sizes) for key in first}
        return found if type(first) is dict else type(first)(found)  # type: ignore[call-arg]
    if isinstance(first, list) and [len(part) for part in parts] == list(sizes):
        return list(itertools.chain.from_iterable(parts))
    if isinstance(first, (list, tuple)):
        items = [joined(item, sizes) for item in zip(*parts, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return first


@dataclass(frozen=True)
class Part:
    """Some consecutive samples of a batch, in the batch's structure."""

    data: Any
    weight: float  # the share of its mean loss in that of the whole batch
    start: int = 0  # its first sample in the batch
    stop: int = 0  # the sample after its last one

    def __len__(self) -> int:
        return self.stop - self.start


class Parts:
    """A batch that can be divided.

    Args:
        batch: any structure.
        samples: how many there are.
        split: in place of :func:`part_of`.
        count: of how many items the loss over some data is a mean; None: the samples.
        counts_whole: False if the whole batch has items for certain: they are counted if it is cut.
    """

    def __init__(
        self,
        batch: Any,
        samples: int,
        *,
        split: Split | None = None,
        count: Count | None = None,
        counts_whole: bool = True,
    ) -> None:
        self.samples = samples
        self._counts_whole = counts_whole
        self._batch = batch
        self._split = split
        self._count = count

    @functools.cached_property
    def items(self) -> float:
        """Of how many the loss over the whole batch is a mean."""
        return float(self.samples if self._count is None else self._count(self._batch))

    def part(self, start: int, stop: int, *, factor: float = 1.0) -> Part:
        """Return the samples from ``start`` to ``stop``; their weight is multiplied by ``factor``.

        The whole batch is handed over as it is.
        """
        is_whole = (start, stop) == (0, self.samples)
        data = self._batch
        if self._split is not None:
            data = self._split(self._batch, start, stop)
        elif not is_whole:
            data = part_of(self._batch, start, stop)
        return Part(data, factor * self._share(data, start, stop), start, stop)

    def _share(self, data: Any, start: int, stop: int) -> float:
        if (start, stop) == (0, self.samples):
            return 1.0 if not self._counts_whole or self.items else 0.0
        items = stop - start if self._count is None else float(self._count(data))
        return items / self.items if self.items else 0.0

    def without_weight(self) -> Part:
        """Return one sample that does not count, for a rank that other ranks' collectives need."""
        return Part(self.part(0, 1).data, 0.0)


def _lengths(batch: Any, name: str, is_strict: bool) -> Iterator[tuple[str, int]]:
    """Yield the length of each array and list of samples, with where it is; 0 for numbers."""
    if _is_array(batch):
        if len(batch.shape) or is_strict:
            yield name, len(batch) if len(batch.shape) else 0
    elif isinstance(batch, (int, float)):
        if is_strict and not isinstance(batch, bool):
            yield name, 0
    elif isinstance(batch, Mapping):
        for key, item in batch.items():
            yield from _lengths(item, f"{name}[{key!r}]", is_strict)
    elif isinstance(batch, list) and not _is_structure(batch):
        yield name, len(batch)
    elif isinstance(batch, (list, tuple)):
        for index, item in enumerate(batch):
            yield from _lengths(item, f"{name}[{index}]", is_strict)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for entry in fields(batch):
            yield from _lengths(
                getattr(batch, entry.name), f"{name}.{entry.name}", is_strict
            )


def _is_array(item: Any) -> bool:
    if isinstance(item, torch.Tensor):
        return True
    return (
        hasattr(item, "__array__") and hasattr(item, "shape") and hasattr(item, "dtype")
    )


def _is_structure(items: Iterable[Any]) -> bool:
    """Recognise a list with arrays in it, as a loader makes of a tuple; no list of samples."""
    return any(
        _is_array(item)
        or (isinstance(item, Mapping) and _is_structure(item.values()))
        or (isinstance(item, (tuple, list)) and _is_structure(item))
        for item in items
    )
