"""Parts of a batch of any shape, along its first dimension, and how large they are."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence

from robust_train.compat import version_of
from robust_train.config.placeholders import MicroBatchPlan
from robust_train.memory.tensors import WALKED, rebuilt

T = TypeVar("T")

Length = Callable[[Any], int]
"""Number of samples in a batch."""

Split = Callable[[Any, int, int], Any]
"""``split(batch, start, stop)``: the samples from ``start`` up to, without, ``stop``."""

Count = Callable[[Any], "float | torch.Tensor"]
"""How many items (samples, tokens, unmasked positions) the loss over this data is a mean of."""


def bounds(samples: int, at_most: int, start: int = 0, *, least: int = 1) -> list[tuple[int, int]]:
    """Split the samples from ``start`` up to ``samples``: as few parts as possible, even in size.

    Even parts need the least memory. No part has fewer than ``least`` samples if there are that
    many: BatchNorm refuses a lone sample. Then parts may exceed ``at_most`` by 1.
    """
    count = samples - start
    parts = -(-count // at_most)
    if parts > 1:
        parts = max(min(parts, count // least), 1)
    edges = [start + count * i // parts for i in range(parts + 1)] if parts else []
    return list(itertools.pairwise(edges))


def share_of(samples: Sequence[T], rank: int, ranks: int) -> Sequence[T]:
    """Return the slice of ``samples`` for ``rank``. The first ranks may have an extra sample."""
    least, more = divmod(len(samples), ranks)
    start = rank * least + min(rank, more)
    length = least + 1 if rank < more else least
    return samples[start : start + length]


def length_of(batch: Any, *, is_strict: bool = False) -> int:
    """Return the number of samples: the first dimension of the tensors, or a list's length.

    Args:
        is_strict: refuse numbers, and arrays without dimensions, which may be about all samples.

    Raises:
        TypeError: the batch has no tensor, array or list of samples.
        ValueError: its tensors differ in their first dimension.
    """
    lengths: list[tuple[str, int]] = []

    def note(item: Any, name: str) -> Any:
        if isinstance(item, PackedSequence):  # its first dimension is time
            raise TypeError(
                "cannot count the samples of a PackedSequence: give length=… and split=…, or pack "
                "in the function"
            )
        if _has_samples(item):
            lengths.append((name, len(item)))
        elif is_strict and (_is_array(item) or type(item) in (int, float)):
            lengths.append((name, 0))
        else:
            return WALKED
        return item

    rebuilt(batch, note)
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
    """Return the samples from ``start`` up to, without, ``stop``, in the structure of ``batch``.

    Tensors and arrays are sliced, which copies nothing. Mappings, tuples and dataclasses are
    rebuilt around their parts. In a list that holds tensors or arrays, such as loaders make from
    tuples, each entry is sliced. Any other list is sliced as a list of samples. Other values stay
    as they are. A list with a tensor for each sample looks the same as a loader's, so pass your own
    functions for it.
    """

    def cut(item: Any, name: str) -> Any:
        if not _has_samples(item):
            return WALKED
        if getattr(item, "is_sparse", False):  # torch slices dense ones only
            return item.narrow_copy(0, start, stop - start)
        return item[start:stop]

    return rebuilt(batch, cut)


def part_of_both_ends(batch: Any, samples: int, size: int) -> Any:
    """Return ``size`` samples, half from the start of ``batch`` and half from its end.

    In a batch that is sorted, by class or by length, its halves differ as much as they can.
    """
    if size >= samples:
        return part_of(batch, 0, samples)
    first = part_of(batch, 0, size // 2)
    last = part_of(batch, samples - (size - size // 2), samples)
    return _concatenated(first, last)


def _concatenated(first: Any, last: Any) -> Any:
    """Join two parts of a batch into a part with the samples of both."""
    lasts: dict[str, Any] = {}

    def note(item: Any, name: str) -> Any:
        if not _has_samples(item):
            return WALKED
        lasts[name] = item
        return item

    def join(item: Any, name: str) -> Any:
        if not _has_samples(item):
            return WALKED
        other = lasts[name]
        if isinstance(item, torch.Tensor):
            return torch.cat([item, other])
        if isinstance(item, list):
            return item + other
        return importlib.import_module("numpy").concatenate([item, other])

    rebuilt(last, note)
    return rebuilt(first, join)


def joined(parts: Sequence[Any], sizes: Sequence[int], *, any_length: bool = False) -> Any:
    """Invert `part_of` for what was made of the parts.

    Entries for samples are put together. A number with a fraction is a mean, any other a count. Of
    the rest the first part's counts.

    Args:
        parts: what there is of each part.
        sizes: the samples in each.
        any_length: arrays and lists need not have an entry for each sample.

    Raises:
        ValueError: the parts do not fit together.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    join = partial(joined, sizes=sizes, any_length=any_length)
    has_entries = _is_array(first) and len(first.shape) > 0
    lengths: Sequence[int] = sizes
    if not any_length and (has_entries or isinstance(first, list)):
        lengths = [len(part) for part in parts]
    is_by_sample = list(lengths) == list(sizes)
    if has_entries:
        shapes = [tuple(part.shape) for part in parts]
        if not is_by_sample or len({shape[1:] for shape in shapes}) > 1:
            raise ValueError(f"they have shapes {shapes}")
        return torch.cat([torch.as_tensor(part) for part in parts])
    if _is_array(first) or type(first) in (int, float):
        return _number_of(parts, sizes)
    if isinstance(first, Mapping):
        content = {}
        for key in first:
            content[key] = join([part[key] for part in parts])
        return content if type(first) is dict else type(first)(content)  # type: ignore[call-arg]
    if isinstance(first, list) and is_by_sample:
        return list(itertools.chain.from_iterable(parts))
    if isinstance(first, (list, tuple)):
        make: Any = getattr(first, "_make", type(first))
        return make(map(join, zip(*parts, strict=True)))
    return first


def _number_of(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    kind = torch.as_tensor(parts[0]).dtype
    if kind == torch.bool:
        return parts[0]
    if not (kind.is_floating_point or kind.is_complex):
        return sum(parts[1:], parts[0])
    shares = (part * size for part, size in zip(parts, sizes, strict=True))
    return sum(shares) / sum(sizes)


@dataclass(frozen=True)
class Part:
    """Some consecutive samples of a batch, in the batch's structure."""

    data: Any
    weight: float  # the share of its mean loss in that of the whole batch
    start: int = 0  # its first sample in the batch
    stop: int = 0  # the sample after its last one
    of: int = 0  # the samples in the batch

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        """Whether it has the batch's last sample."""
        return self.stop == self.of

    @property
    def is_whole(self) -> bool:
        """Whether it is the batch itself."""
        return self.is_last and not self.start


@dataclass
class Parts:
    """A batch that can be divided."""

    batch: Any  # any structure
    samples: int  # how many there are
    split: Split = part_of
    # Returns the number of items that a loss averages over. None: the samples.
    count: Count | None = None
    # False if the whole batch has items for certain: they are counted if it is cut
    counts_whole: bool = True

    @classmethod
    def of(
        cls, batch: Any, length: Length | None, split: Split | None, count: Count | None = None
    ) -> Parts:
        """Return a user's batch. Without a length function, its samples are counted here."""
        if not length:
            length = len if split else length_of
        return cls(batch, length(batch), split or part_of, count)

    def __post_init__(self) -> None:
        # not those that a function may put in their place
        self._tensors = _versions_in(self.batch)

    @property
    def has_changed(self) -> bool:
        """Whether a tensor of the batch has been changed in place since then."""
        return any(version_of(tensor) != at for tensor, at in self._tensors)

    @functools.cached_property
    def items(self) -> float:
        """Of how many the loss over the whole batch is a mean."""
        return float(self.samples if self.count is None else self.count(self.batch))

    def part(self, start: int, stop: int, *, factor: float = 1.0) -> Part:
        """Return the samples from ``start`` to ``stop``, their weight multiplied by ``factor``.

        The whole batch is passed on as it is.
        """
        is_whole = (start, stop) == (0, self.samples)
        data = self.batch
        if not is_whole or self.split is not part_of:
            data = self.split(data, start, stop)
        if is_whole:
            share = float(not self.counts_whole or self.items != 0)
        else:
            items = stop - start if self.count is None else float(self.count(data))
            share = items / self.items if self.items else 0.0
        return Part(data, factor * share, start, stop, self.samples)

    def without_weight(self) -> Part:
        """Return a sample that does not count, for a rank that other ranks' collectives need."""
        return Part(self.part(0, 1).data, 0.0)


def _versions_in(batch: Any) -> list[tuple[Any, int]]:
    versions: list[tuple[Any, int]] = []

    def note(item: Any, name: str) -> Any:
        if not _has_samples(item):
            return WALKED
        versions.append((item, version_of(item)))
        return item

    rebuilt(batch, note)
    return versions


def _is_array(item: Any) -> bool:
    if isinstance(item, torch.Tensor):
        return True
    return hasattr(item, "__array__") and hasattr(item, "shape") and hasattr(item, "dtype")


def _has_samples(item: Any) -> bool:
    if _is_array(item):
        return len(item.shape) > 0
    return isinstance(item, list) and not _is_structure(item)


def _is_structure(items: Iterable[Any]) -> bool:
    """Return whether this is a list of arrays, which a loader makes from a tuple, and not a list of
    samples."""
    return any(
        _is_array(item)
        or (isinstance(item, Mapping) and _is_structure(item.values()))
        or (isinstance(item, (tuple, list)) and _is_structure(item))
        for item in items
    )


# --- how large ---

SizeState = dict[str, Any]
"""The state of `MicroBatchSize` in a checkpoint."""


class MicroBatchSize:
    """The size in use, and what is known about others. Samples throughout. It halves,
    rounded up, down to the plan's smallest, and never grows."""

    def __init__(self, plan: MicroBatchPlan) -> None:
        self._plan = plan
        # None as long as that is the whole batch
        self.current = plan.batch_size
        self._failures = set[int]()  # sizes at which memory ran out
        self._found: int | None = None  # the size that probes found
        self._largest_batch = 0

    @property
    def refuses_lone_samples(self) -> bool:
        """Whether the smallest size that the user allows is above 1."""
        return self._plan.min_batch_size > 1

    @property
    def tried(self) -> tuple[int, ...]:
        """Sizes at which memory ran out, the largest first."""
        return tuple(sorted(self._failures, reverse=True))

    def for_batch(self, samples: int) -> int:
        """Return the maximum size of a part of a batch of ``samples``, at least 1."""
        self._largest_batch = max(self._largest_batch, samples)
        return max(min(self.current or samples, samples), 1)

    def begin_at(self, size: int | None) -> None:
        """Use the size that probes found to fit, and never more. None changes nothing."""
        if size is not None:
            self.current = self._found = size

    def smaller_than(self, failed: int) -> int | None:
        """Return the next smaller size, None if ``failed`` is the smallest."""
        least = self._plan.min_batch_size
        if failed <= least:
            return None
        # Parts need not divide the batch: 5 samples of which 4 fit are 3 and 2.
        return max(-(-failed // 2), least)

    def failed_at(self, size: int) -> None:
        """Record that memory ran out at ``size``, and use the next smaller size, if any."""
        self._failures.add(size)
        self.current = self.smaller_than(size) or self.current

    def shrink(self) -> tuple[int, int] | None:
        """Use the next smaller size on request, and never more again: (from, to), or None."""
        largest = self._largest_batch
        before = min(self.current or largest, largest or self.current or 0)
        smaller = self.smaller_than(before)
        if smaller is None:
            return None
        self.agree(smaller)
        return before, smaller

    def agree(self, size: int | None, *, failed: int = 0, is_known: bool = False) -> None:
        """Adopt the agreement of several ranks.

        Args:
            size: the maximum size of a part from now on. None: the whole batch.
            failed: the size at which memory ran out on some rank, or 0.
            is_known: it ran out on this rank, and `failed_at` was called.
        """
        if failed and not is_known:
            self.failed_at(failed)
        if size is not None and size < (self.current or math.inf):
            self.current = size

    def state(self) -> SizeState:
        """Return it for a checkpoint."""
        return {
            "requested": self._plan.batch_size,
            "current": self.current,
            "failures": sorted(self._failures),
            "found": self._found,
        }

    def restore(self, state: SizeState) -> None:
        """Take over `state`'s result, unless another size was requested since."""
        requested = self._plan.batch_size
        before = state["requested"]
        # what probes had found is requested by its number afterwards
        if requested in (before, state.get("found") or before):
            self.current = state["current"]
            self._failures = set(state["failures"])
            self._found = state.get("found")
