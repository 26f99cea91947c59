"""Parts of a batch of any shape, along its first dimension."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

Length = Callable[[Any], int]
"""Number of samples in a batch."""

Split = Callable[[Any, int, int], Any]
"""``split(batch, start, stop)``: the samples from ``start`` up to, without, ``stop``."""


Count = Callable[[Any], "float | torch.Tensor"]
"""How many items (samples, tokens, unmasked positions) the loss over this data is a mean of."""


def bounds(samples: int, at_most: int, start: int = 0) -> list[tuple[int, int]]:
    """Parts of the samples from ``start`` up to ``samples``: as few as may be, even in size.

    Even parts need the least memory, and the last is no lone sample, which BatchNorm would refuse,
    where there are others to share with.
    """
    count = samples - start
    parts = -(-count // at_most)
    edges = [start + count * i // parts for i in range(parts + 1)] if parts else []
    return list(itertools.pairwise(edges))


def length_of(batch: Any) -> int:
    """Number of samples: the first dimension of the tensors in ``batch``, or a list's length.

    Raises:
        TypeError: there is no tensor, array or list of samples in it.
        ValueError: they differ in their first dimension.
    """
    lengths: dict[str, int] = {}
    _collect_lengths(batch, "batch", lengths)
    if not lengths:
        raise TypeError(
            f"cannot count the samples of a {type(batch).__name__}: it holds no tensor, array or "
            "list; give length=… and split=…"
        )
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ValueError(f"cannot tell the number of samples: {listed}; give length=… and split=…")
    return next(iter(lengths.values()))


def part_of(batch: Any, start: int, stop: int) -> Any:
    """The samples from ``start`` up to, without, ``stop``, in the same structure as ``batch``.

    Tensors and arrays are sliced, which copies nothing; mappings, tuples and dataclasses are built
    anew around their parts. A list that holds tensors or arrays, as loaders make of tuples, is
    walked, any other is sliced as a list of samples. The rest goes along as it is. A list with one
    tensor for each sample looks the same as a loader's: for that give functions of your own.
    """
    if _is_array(batch):
        return batch[start:stop] if _rank(batch) else batch
    if isinstance(batch, Mapping):
        return _rebuilt_mapping(
            batch, {key: part_of(item, start, stop) for key, item in batch.items()}
        )
    if isinstance(batch, tuple):
        parts = [part_of(item, start, stop) for item in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if isinstance(batch, list):
        if not _is_structure(batch):
            return batch[start:stop]
        return [part_of(item, start, stop) for item in batch]
    if is_dataclass(batch) and not isinstance(batch, type):
        return _rebuilt_dataclass(batch, start, stop)
    return batch


class Parts:
    """A batch that can be divided.

    Args:
        batch: any structure.
        samples: how many there are.
        split: in place of :func:`part_of`.
        count: of how many items the loss over some data is a mean; None for the samples.

    Attributes:
        items: of how many the loss over the whole batch is a mean.
    """

    def __init__(
        self, batch: Any, samples: int, *, split: Split | None = None, count: Count | None = None
    ) -> None:
        self.batch = batch
        self.samples = samples
        self._split = split
        self._count = count
        self.items = float(samples if count is None else count(batch))

    def part(self, start: int, stop: int) -> tuple[Any, float]:
        """The data from ``start`` to ``stop``, and its share in the mean over the batch."""
        is_whole = (start, stop) == (0, self.samples)
        if self._split is not None:
            data = self._split(self.batch, start, stop)
        else:
            data = self.batch if is_whole else part_of(self.batch, start, stop)
        if is_whole:
            return data, 1.0 if self.items else 0.0
        items = stop - start if self._count is None else float(self._count(data))
        return data, items / self.items if self.items else 0.0


def _collect_lengths(batch: Any, name: str, lengths: dict[str, int]) -> None:
    if _is_array(batch):
        if _rank(batch):
            lengths[name] = len(batch)
    elif isinstance(batch, Mapping):
        for key, item in batch.items():
            _collect_lengths(item, f"{name}[{key!r}]", lengths)
    elif isinstance(batch, list) and not _is_structure(batch):
        lengths[name] = len(batch)
    elif isinstance(batch, (list, tuple)):
        for index, item in enumerate(batch):
            _collect_lengths(item, f"{name}[{index}]", lengths)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for entry in fields(batch):
            _collect_lengths(getattr(batch, entry.name), f"{name}.{entry.name}", lengths)


def _is_array(item: Any) -> bool:
    if isinstance(item, torch.Tensor):
        return True
    return hasattr(item, "__array__") and hasattr(item, "shape") and hasattr(item, "dtype")


def _rank(array: Any) -> int:
    return len(array.shape)


def _is_structure(items: Iterable[Any]) -> bool:
    """A list with arrays in it, as a loader makes of a tuple, and not a list of samples."""
    return any(
        _is_array(item)
        or (isinstance(item, Mapping) and _is_structure(item.values()))
        or (isinstance(item, (tuple, list)) and _is_structure(item))
        for item in items
    )


def _rebuilt_mapping(batch: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    if type(batch) is dict:
        return parts
    # such as transformers' BatchEncoding, which is made of a dictionary
    return type(batch)(parts)  # type: ignore[call-arg]


def _rebuilt_dataclass(batch: Any, start: int, stop: int) -> Any:
    part = copy.copy(batch)
    for entry in fields(batch):
        # also where the class is frozen
        object.__setattr__(part, entry.name, part_of(getattr(batch, entry.name), start, stop))
    return part
