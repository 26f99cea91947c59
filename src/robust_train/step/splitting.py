"""Parts of a batch of any shape, along its first dimension, and how large they are."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypedDict, TypeVar

import torch

from robust_train.policy.sizes import next_smaller, settings_of_batch

T = TypeVar("T")

Length = Callable[[Any], int]
"""Number of samples in a batch."""

Split = Callable[[Any, int, int], Any]
"""``split(batch, start, stop)``: the samples from ``start`` up to, without, ``stop``."""

Count = Callable[[Any], "float | torch.Tensor"]
"""How many items (samples, tokens, unmasked positions) the loss over this data is a mean of."""


def bounds(
    samples: int,
    at_most: int,
    start: int = 0,
) -> list[tuple[int, int]]:
    """Split the samples from ``start`` up to ``samples``: as few parts as may be, even in size.

    Even parts need the least memory, and the last is not a lone sample, which BatchNorm would
    refuse, if there are others to share with.
    """
    count = samples - start
    parts = -(-count // at_most)
    edges = [start + count * i // parts for i in range(parts + 1)] if parts else []
    return list(itertools.pairwise(edges))


def share_of(
    samples: Sequence[T],
    rank: int,
    ranks: int,
) -> Sequence[T]:
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
    lengths: list[tuple[str, int]] = []

    def note(item: Any, name: str) -> Any:
        if _is_array(item):
            if len(item.shape) or is_strict:
                lengths.append((name, item.shape[0] if len(item.shape) else 0))
        elif isinstance(item, list):
            lengths.append((name, len(item)))
        elif is_strict and type(item) in (int, float):
            lengths.append((name, 0))
        return item

    _rebuilt(batch, note)
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


def part_of(
    batch: Any,
    start: int,
    stop: int,
) -> Any:
    """Return the samples from ``start`` up to, without, ``stop``, in the structure of ``batch``.

    Tensors and arrays are sliced, which copies nothing; mappings, tuples and dataclasses are built
    again around their parts. A list that holds tensors or arrays, as loaders make of tuples, is
    walked, any other is sliced as a list of samples. The rest goes along as it is. A list with one
    tensor for each sample looks the same as a loader's: for that give functions of your own.
    """

    def cut(item: Any, name: str) -> Any:
        is_cut = len(item.shape) if _is_array(item) else isinstance(item, list)
        return item[start:stop] if is_cut else item

    return _rebuilt(batch, cut)


def _rebuilt(
    value: Any,
    leaf: Callable[[Any, str], Any],
    name: str = "batch",
) -> Any:
    """Return mappings, tuples, dataclasses and lists with arrays in them around what ``leaf``
    returns for each part, given with where it is."""
    if isinstance(value, Mapping):
        items = {
            key: _rebuilt(item, leaf, f"{name}[{key!r}]") for key, item in value.items()
        }
        # others, such as transformers' BatchEncoding, are made of a dictionary
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple) or (isinstance(value, list) and _is_structure(value)):
        parts = [
            _rebuilt(item, leaf, f"{name}[{index}]") for index, item in enumerate(value)
        ]
        if isinstance(value, list):
            return parts
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        for entry in fields(value):
            part = _rebuilt(
                getattr(value, entry.name),
                leaf,
                f"{name}.{entry.name}",
            )
            # also where the class is frozen
            object.__setattr__(result, entry.name, part)
        return result
    return leaf(value, name)


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

    def part(
        self,
        start: int,
        stop: int,
        *,
        factor: float = 1.0,
    ) -> Part:
        """Return the samples from ``start`` to ``stop``; their weight is multiplied by ``factor``.

        The whole batch is handed over as it is.
        """
        is_whole = (start, stop) == (0, self.samples)
        data = self._batch
        if self._split is not None:
            data = self._split(self._batch, start, stop)
        elif not is_whole:
            data = part_of(self._batch, start, stop)
        return Part(
            data,
            factor * self._share(data, start, stop),
            start,
            stop,
        )

    def _share(
        self,
        data: Any,
        start: int,
        stop: int,
    ) -> float:
        if (start, stop) == (0, self.samples):
            return 1.0 if not self._counts_whole or self.items else 0.0
        items = stop - start if self._count is None else float(self._count(data))
        return items / self.items if self.items else 0.0

    def without_weight(self) -> Part:
        """Return one sample that does not count, for a rank that other ranks' collectives need."""
        return Part(self.part(0, 1).data, 0.0)


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


# --- how large ---


class SizeState(TypedDict, total=False):
    """What a checkpoint keeps of :class:`MicroBatchSize`."""

    requested: int | None
    current: int | None
    failures: list[list[int]]
    clean_steps: int
    limit: int | None
    found: int | None


class MicroBatchSize:
    """The size in use, and what is known about others. Samples throughout. It shrinks as the
    launcher's does: at most half, at least ``min_batch_size``, a divisor of the effective batch
    where there is one."""

    def __init__(
        self,
        batch_size: int | None,  # to begin with; None: as many as the first batch has
        *,
        min_batch_size: int = 1,  # never less
        # for the effective batch, whose divisors are preferred
        gradient_accumulation_steps: int = 1,
        # steps without running out of memory after which the next larger size is tried; each
        # failure of a size doubles its wait. None or 0: never.
        regrow_after_steps: int | None = None,
    ) -> None:
        self.current = batch_size
        self._min = min_batch_size
        self._accumulation = gradient_accumulation_steps
        self._requested = batch_size
        self._regrow_after = regrow_after_steps or 0
        self._failures: dict[int, int] = {}
        self._clean_steps = 0
        self._limit: int | None = None
        self._found: int | None = None
        self._largest_batch = 0

    @property
    def tried(self) -> tuple[int, ...]:
        """Sizes at which memory ran out, the largest first."""
        return tuple(sorted(self._failures, reverse=True))

    def for_batch(self, samples: int) -> int:
        """Return the most samples in one part of a batch of ``samples``, at least 1."""
        self._largest_batch = max(self._largest_batch, samples)
        return max(min(self.current or samples, samples), 1)

    def begin_at(self, size: int | None) -> None:
        """Use what probes have found to fit, and never more; None changes nothing."""
        if size is not None:
            self.current = self._found = self._limit = size

    def smaller_than(self, failed: int) -> int | None:
        """Return the next smaller size, None if ``failed`` is the smallest."""
        if failed <= self._min:
            return None
        settings = settings_of_batch(
            max(self._requested or failed, failed),
            self._accumulation,
            min_batch_size=self._min,
        )
        return next_smaller(settings, failed)

    def failed_at(self, size: int) -> None:
        """Record that memory ran out at ``size``: use the next smaller one, if any."""
        self._count_failure(size)
        self.current = self.smaller_than(size) or self.current

    def shrink(self) -> tuple[int, int] | None:
        """Use the next smaller size on request, and never more again: (from, to), or None."""
        before = (
            min(self.current or self._largest_batch, self._largest_batch)
            or self.current
        )
        smaller = None if before is None else self.smaller_than(before)
        if before is None or smaller is None:
            return None
        self.current = self._limit = smaller
        self._clean_steps = 0
        return before, smaller

    def agree(
        self,
        size: int | None,
        *,
        failed: int = 0,
        is_known: bool = False,
    ) -> None:
        """Take over what several ranks have agreed on.

        Args:
            size: most samples in a part from now on; None: the whole batch.
            failed: the size at which memory ran out on some rank, 0 where it did not.
            is_known: that was here, and :meth:`failed_at` was called.
        """
        if failed and not is_known:
            self._count_failure(failed)
        if size is not None and (self.current is None or size < self.current):
            self.current = size
            if not failed:  # it was requested on another rank
                self._limit = size
                self._clean_steps = 0

    def step_done(self) -> tuple[int, int] | None:
        """Count an optimizer step; return (from, to) if the size grows for the next one."""
        if not self._regrow_after or self.current is None:
            return None
        self._clean_steps += 1
        known = {*self._failures, self._requested or 0}
        most = self._limit or max(known)
        larger = min(
            (size for size in known if self.current < size <= most), default=None
        )
        if larger is None:
            return None
        times_failed = self._failures.get(larger, 1)
        if self._clean_steps < self._regrow_after * 2 ** (times_failed - 1):
            return None
        before, self.current = self.current, larger
        self._clean_steps = 0
        return before, larger

    def state(self) -> SizeState:
        """Return it for a checkpoint."""
        return {
            "requested": self._requested,
            "current": self.current,
            "failures": [list(item) for item in self._failures.items()],
            "clean_steps": self._clean_steps,
            "limit": self._limit,
            "found": self._found,
        }

    def restore(self, state: SizeState) -> None:
        """Take over :meth:`state`'s result, unless another size was requested since."""
        # what probes had found is requested by its number afterwards
        if self._requested not in (state["requested"], state.get("found")):
            return
        self.current = state["current"]
        self._failures = {int(size): int(times) for size, times in state["failures"]}
        self._clean_steps = state["clean_steps"]
        self._limit = state.get("limit")

    def _count_failure(self, size: int) -> None:
        self._failures[size] = self._failures.get(size, 0) + 1
        self._clean_steps = 0
