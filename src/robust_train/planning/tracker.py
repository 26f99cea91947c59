"""The memory of live tensors, real or fake, counted by storage while a program runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WEIGHTS = "weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
ACTIVATIONS = "activations"
TEMPORARIES = "temporaries"
KERNELS = "kernels"
CATEGORIES = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES, KERNELS)

Scratch = Callable[[Any, tuple[Any, ...], Any], int]
"""Bytes that an operation holds only while it runs, of its name, arguments and result."""


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live storages, and remembers the most there were at once.

    Views share a storage, which counts once; it stops counting when its last tensor is gone,
    autograd's saved tensors included. What existed before has to be named with :meth:`label`.
    torch's own ``MemTracker`` needs torch.distributed and cannot count what kernels use.

    Args:
        block_bytes: sizes are rounded up to it; 1 counts what was requested.
        scratch: what operations allocate beside their results.

    Attributes:
        current: bytes that are live now.
        peak: the most that were.
        at_peak: bytes of each category at that moment.
        category: what new storages are taken for.
    """

    def __init__(self, *, block_bytes: int = 1, scratch: Scratch | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = self.peak = 0
        self.at_peak: Mapping[str, int] = dict.fromkeys(CATEGORIES, 0)
        self.category = TEMPORARIES
        self._block_bytes = block_bytes
        self._scratch = scratch
        self._live: dict[int, tuple[weakref.ref[Any], int, str]] = {}
        self._now = dict.fromkeys(CATEGORIES, 0)

    def reset_peak(self) -> None:
        """Let the peak start anew from what is live now."""
        self.peak, self.at_peak = self.current, dict(self._now)

    def label(self, tensors: Iterable[Tensor | None], category: str) -> None:
        """Count ``tensors`` to a category; those that are not known yet begin to count."""
        for tensor in tensors:
            if tensor is None:
                continue
            self._see(tensor)
            key = tensor.untyped_storage()._cdata
            reference, size, before = self._live[key]
            self._live[key] = (reference, size, category)
            self._now[before] -= size
            self._now[category] += size

    @contextmanager
    def taking_for(self, category: str) -> Iterator[None]:
        """Count new storages within the block to this category."""
        before, self.category = self.category, category
        try:
            yield
        finally:
            self.category = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.counts(func, kwargs or {}):
            for tensor in _tensors_in(result):
                self._see(tensor)
            if self._scratch is not None:
                self._note_peak(self._scratch(func, args, result))
        return result

    def counts(self, operation: Any, options: Mapping[str, Any]) -> bool:
        """Return whether the results of an operation are on the device that is counted."""
        return True

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = -(-storage.nbytes() // self._block_bytes) * self._block_bytes
        known = self._live.get(key)
        if known is not None:
            if known[1] != size:  # it was resized
                self._live[key] = (known[0], size, known[2])
                self._count(known[2], size - known[1])
            return
        # the storage's Python object lives as long as the storage itself
        gone = weakref.ref(storage, partial(self._forget, key))
        self._live[key] = (gone, size, self.category)
        self._count(self.category, size)

    def _forget(self, key: int, reference: Any) -> None:
        _, size, category = self._live.pop(key)
        self._count(category, -size)

    def _count(self, category: str, size: int) -> None:
        self.current += size
        self._now[category] += size
        self._note_peak(0)

    def _note_peak(self, scratch: int) -> None:
        if self.current + scratch > self.peak:
            self.peak = self.current + scratch
            self.at_peak = self._now | {KERNELS: scratch}


def _tensors_in(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for item in result:
            yield from _tensors_in(item)
