"""Parts of a batch of any shape, along its first dimension, and how large they are."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch

from robust_train.config.placeholders import MicroBatchPlan
from robust_train.memory.tensors import WALKED, rebuilt
from robust_train.policy.sizes import next_smaller

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
    edges = (
        [start + count * i // parts for i in range(parts + 1)] if parts else []
    )
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
        if _has_samples(item):
            return item[start:stop]
        return WALKED

    return rebuilt(batch, cut)


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
        are_alike = len({shape[1:] for shape in shapes}) == 1
        if not are_alike or [len(part) for part in parts] != list(sizes):
            raise ValueError(f"they have shapes {shapes}")
        return torch.cat([torch.as_tensor(part) for part in parts])
    if isinstance(first, float) or (
        _is_array(first) and torch.as_tensor(first).is_floating_point()
    ):
        return sum(
            part * size for part, size in zip(parts, sizes, strict=True)
        ) / sum(sizes)
    if isinstance(first, Mapping):
        found = {
            key: joined([part[key] for part in parts], sizes) for key in first
        }
        return found if type(first) is dict else type(first)(found)  # type: ignore[call-arg]
    if isinstance(first, list) and [len(part) for part in parts] == list(
        sizes
    ):
        return list(itertools.chain.from_iterable(parts))
    if isinstance(first, (list, tuple)):
        items = [joined(item, sizes) for item in zip(*parts, strict=True)]
        make: Any = getattr(first, "_make", type(first))
        return make(items)
    return first


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
    # of how many items a loss is a mean; None: the samples
    count: Count | None = None
    # False if the whole batch has items for certain: they are counted if it is cut
    counts_whole: bool = True

    @classmethod
    def of(
        cls,
        batch: Any,
        length: Length | None,
        split: Split | None,
        count: Count | None = None,
    ) -> Parts:
        """Return a user's batch; without a length of theirs it is counted here."""
        length = length or (len if split else length_of)
        return cls(
            batch,
            length(batch),
            split or part_of,
            count,
        )

    @functools.cached_property
    def items(self) -> float:
        """Of how many the loss over the whole batch is a mean."""
        return float(
            self.samples if self.count is None else self.count(self.batch)
        )

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
        is_whole, data = (start, stop) == (0, self.samples), self.batch
        if not is_whole or self.split is not part_of:
            data = self.split(data, start, stop)
        if is_whole:
            share = float(not self.counts_whole or self.items != 0)
        else:
            items = (
                stop - start if self.count is None else float(self.count(data))
            )
            share = items / self.items if self.items else 0.0
        return Part(
            data,
            factor * share,
            start,
            stop,
            self.samples,
        )

    def without_weight(self) -> Part:
        """Return one sample that does not count, for a rank that other ranks' collectives need."""
        return Part(self.part(0, 1).data, 0.0)


def _is_array(item: Any) -> bool:
    if isinstance(item, torch.Tensor):
        return True
    return (
        hasattr(item, "__array__")
        and hasattr(item, "shape")
        and hasattr(item, "dtype")
    )


def _has_samples(item: Any) -> bool:
    if _is_array(item):
        return len(item.shape) > 0
    return isinstance(item, list) and not _is_structure(item)


def _is_structure(items: Iterable[Any]) -> bool:
    """Recognise a list with arrays in it, as a loader makes of a tuple; no list of samples."""
    return any(
        _is_array(item)
        or (isinstance(item, Mapping) and _is_structure(item.values()))
        or (isinstance(item, (tuple, list)) and _is_structure(item))
        for item in items
    )


# --- how large ---

SizeState = dict[str, Any]
"""What a checkpoint keeps of :class:`MicroBatchSize`."""


@dataclass
class _Known:
    current: int | None
    failures: dict[int, int] = field(default_factory=dict)
    clean_steps: int = 0
    limit: int | None = None
    found: int | None = None


class MicroBatchSize:
    """The size in use, and what is known about others. Samples throughout. It shrinks as the
    launcher's does: at most half, at least the plan's smallest, a divisor of the effective batch
    where there is one. Each failure of a size doubles the steps until it is tried again."""

    def __init__(self, plan: MicroBatchPlan) -> None:
        self._plan = plan
        self._known = _Known(plan.batch_size)
        self._largest_batch = 0

    @property
    def current(self) -> int | None:
        """The size in use, None as long as that is the whole batch."""
        return self._known.current

    @property
    def tried(self) -> tuple[int, ...]:
        """Sizes at which memory ran out, the largest first."""
        return tuple(sorted(self._known.failures, reverse=True))

    def for_batch(self, samples: int) -> int:
        """Return the most samples in one part of a batch of ``samples``, at least 1."""
        self._largest_batch = max(self._largest_batch, samples)
        return max(min(self.current or samples, samples), 1)

    def begin_at(self, size: int | None) -> None:
        """Use what probes have found to fit, and never more; None changes nothing."""
        if size is not None:
            self._known.current = self._known.found = self._known.limit = size

    def smaller_than(self, failed: int) -> int | None:
        """Return the next smaller size, None if ``failed`` is the smallest."""
        plan = self._plan
        if failed <= plan.min_batch_size:
            return None
        share = (
            max(plan.batch_size or 0, failed)
            * plan.gradient_accumulation_steps
        )
        return next_smaller(failed, plan.min_batch_size, share)

    def failed_at(self, size: int) -> None:
        """Record that memory ran out at ``size``: use the next smaller one, if any."""
        known = self._known
        known.failures[size] = known.failures.get(size, 0) + 1
        known.clean_steps = 0
        known.current = self.smaller_than(size) or known.current

    def shrink(self) -> tuple[int, int] | None:
        """Use the next smaller size on request, and never more again: (from, to), or None."""
        largest = self._largest_batch
        before = min(self.current or largest, largest or self.current or 0)
        smaller = self.smaller_than(before)
        if smaller is None:
            return None
        self.agree(smaller)
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
            self.failed_at(failed)
        if size is not None and size < (self.current or math.inf):
            self._known.current = size
            if not failed:  # it was requested on another rank
                self._known.limit = size
                self._known.clean_steps = 0

    def step_done(self) -> tuple[int, int] | None:
        """Count an optimizer step; return (from, to) if the size grows for the next one."""
        known, before = self._known, self._known.current
        plan = self._plan
        if not plan.regrow_after_steps or before is None:
            return None
        known.clean_steps += 1
        sizes = known.failures.keys() | {plan.batch_size or 0}
        most = known.limit or max(sizes)
        larger = min(
            (size for size in sizes if before < size <= most), default=0
        )
        wait = plan.regrow_after_steps * 2 ** (
            known.failures.get(larger, 1) - 1
        )
        if not larger or known.clean_steps < wait:
            return None
        known.current, known.clean_steps = larger, 0
        return before, larger

    def state(self) -> SizeState:
        """Return it for a checkpoint."""
        return asdict(self._known) | {
            "requested": self._plan.batch_size,
            "failures": [list(item) for item in self._known.failures.items()],
        }

    def restore(self, state: SizeState) -> None:
        """Take over :meth:`state`'s result, unless another size was requested since."""
        requested, before = self._plan.batch_size, state["requested"]
        # what probes had found is requested by its number afterwards
        if requested in (before, state.get("found") or before):
            known = state | {"failures": dict(state["failures"])}
            del known["requested"]
            self._known = _Known(**known)
