"""Copies tensors that a step may write to, and restores them.

:mod:`.buffers` and :mod:`.attributes` use :class:`Copies` in the process that trains. The memory of
the copies is used again in the next step.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Container
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from robust_train.compat import copy_at_once, versions_of
from robust_train.readable import MIB

ALWAYS_COPIED = MIB
"""The size up to which a tensor is copied in each step. Its version counter does not show every
change: kernels write BatchNorm's statistics without counting, and a frozen layer may be trained
later."""

# Assigning to ``.data`` may change the shape and the number format of a tensor.
_FORM = attrgetter("shape", "dtype")


def is_small(tensor: Tensor, most_bytes: int = ALWAYS_COPIED) -> bool:
    """Return whether a tensor is small enough to be copied in each step."""
    return not tensor.is_sparse and tensor.nbytes <= most_bytes


class Copies:
    """Copies of small tensors, and of large tensors that an earlier step has changed.

    Args:
        most_bytes: the size up to which a tensor is always copied.
    """

    def __init__(self, most_bytes: int = ALWAYS_COPIED) -> None:
        self._most_bytes = most_bytes
        self._tensors: list[Tensor | None] = []
        # Copies and originals, grouped by device and number format. torch copies a list of mixed
        # tensors slowly, with a kernel for each tensor.
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []
        self._forms: list[Any] = []  # of the tensors that are copied
        self._uncopied: list[Tensor] = []
        self._uncopied_versions: list[tuple[int, int]] = []
        self._changing: set[int] = set()  # ids of large tensors that an earlier step changed

    def take(self, tensors: list[Tensor | None]) -> None:
        """Copy the present values of tensors, for :meth:`restore`."""
        if not self._are_arranged(tensors):
            self._arrange(tensors)
        with torch.no_grad():
            for copies, originals in self._groups:
                copy_at_once(torch, copies, originals)

    def _are_arranged(self, tensors: list[Tensor | None]) -> bool:
        """Return whether the copies of the previous step suit these tensors."""
        if len(tensors) != len(self._tensors) or not all(map(is_, tensors, self._tensors)):
            return False
        copied = itertools.chain.from_iterable(originals for _, originals in self._groups)
        return not self.is_lost and list(map(_FORM, copied)) == self._forms

    def _arrange(self, tensors: list[Tensor | None]) -> None:
        """Choose the tensors to copy, and allocate copies. Earlier copies are used again."""
        versions_now = versions_of(self._uncopied)
        for uncopied, before, now in zip(
            self._uncopied, self._uncopied_versions, versions_now, strict=True
        ):
            if before != now:
                self._changing.add(id(uncopied))
        copy_by_id: dict[int, Tensor] = {}
        for copies, originals in self._groups:
            copy_by_id.update(zip(map(id, originals), copies, strict=True))
        self._tensors = tensors
        groups: defaultdict[Any, tuple[list[Tensor], list[Tensor]]]
        groups = defaultdict(lambda: ([], []))
        self._uncopied = []
        for tensor in tensors:
            if tensor is None:
                continue
            # The first pass makes a lazy tensor. An inference tensor never changes in place.
            can_change = not (is_lazy(tensor) or tensor.is_inference())
            is_copied = is_small(tensor, self._most_bytes) or id(tensor) in self._changing
            if not (can_change and is_copied):
                self._uncopied.append(tensor)
                continue
            copy = copy_by_id.get(id(tensor))
            if copy is None or _FORM(copy) != _FORM(tensor):
                copy = torch.empty_like(tensor)
            copies, originals = groups[tensor.device, tensor.dtype]
            copies.append(copy)
            originals.append(tensor)
        self._groups = list(groups.values())
        self._forms = [_FORM(t) for _, originals in self._groups for t in originals]
        self._uncopied_versions = versions_of(self._uncopied)

    @property
    def is_lost(self) -> bool:
        """Whether a tensor without a copy was written to, so that it cannot be restored."""
        return versions_of(self._uncopied) != self._uncopied_versions

    @torch.no_grad()
    def restore(self, only: Container[int] | None = None) -> None:
        """Restore the values of all tensors.

        Args:
            only: the ids of the tensors to restore. None: all.
        """
        for copies, originals in self._groups:
            sources = []
            targets = []
            for copy, tensor in zip(copies, originals, strict=True):
                if only is not None and id(tensor) not in only:
                    continue
                # The buffers of a quantization observer grow.
                if tensor.shape != copy.shape:
                    tensor.resize_(copy.shape)
                sources.append(copy)
                targets.append(tensor)
            if targets:
                copy_at_once(torch, targets, sources)
