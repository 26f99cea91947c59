"""Copies of tensors that a step may write to, whose memory the next step uses again."""

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
"""Bytes of a tensor that is copied in each step: kernels write BatchNorm's statistics around the
version counter, and a frozen layer may be trained later."""

# ``.data = …`` may change them
_FORM = attrgetter("shape", "dtype")


def is_small(tensor: Tensor, most_bytes: int = ALWAYS_COPIED) -> bool:
    """Return whether a tensor is copied in each step, if it can be."""
    return not tensor.is_sparse and tensor.nbytes <= most_bytes


class Copies:
    """Copies of the small tensors among those given, and of a large tensor once a step has changed
    it."""

    def __init__(self, most_bytes: int = ALWAYS_COPIED) -> None:
        self._most_bytes = most_bytes  # the largest tensor that is always copied
        self._now: list[Tensor | None] = []
        self._forms: list[Any] = []  # forms of the tensors that are copied
        # targets and sources of one device and number format: a list of mixed ones would take
        # torch's slow path, a kernel for each
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []
        self._others: list[Tensor] = []  # that are not copied
        self._versions: list[tuple[int, int]] = []  # theirs
        self._changing: set[int] = set()  # indices of tensors that an earlier step changed

    def take(self, now: list[Tensor | None]) -> None:
        """Take the values that tensors have now as those to go back to."""
        copied = itertools.chain.from_iterable(sources for _, sources in self._groups)
        if (
            len(now) != len(self._now)
            or not all(map(is_, now, self._now))
            or self.is_lost
            or list(map(_FORM, copied)) != self._forms
        ):
            self._arrange(now)
        with torch.no_grad():
            for targets, sources in self._groups:
                copy_at_once(torch, targets, sources)

    def _arrange(self, now: list[Tensor | None]) -> None:
        versions = versions_of(self._others)
        both = zip(self._others, self._versions, versions, strict=True)
        self._changing |= {id(tensor) for tensor, at, now_at in both if at != now_at}
        pairs = (zip(*group, strict=True) for group in self._groups)
        copies = {id(t): copy for copy, t in itertools.chain(*pairs)}
        self._now = now
        groups: defaultdict[Any, tuple[list[Tensor], list[Tensor]]]
        groups = defaultdict(lambda: ([], []))
        self._others = []
        for tensor in now:
            if tensor is None:
                continue
            # made by the first pass, or never changed in place
            is_kept = not (is_lazy(tensor) or tensor.is_inference())
            is_copied = is_small(tensor, self._most_bytes) or id(tensor) in self._changing
            if not (is_kept and is_copied):
                self._others.append(tensor)
                continue
            copy = copies.get(id(tensor))
            if copy is None or _FORM(copy) != _FORM(tensor):
                copy = torch.empty_like(tensor)
            targets, sources = groups[tensor.device, tensor.dtype]
            targets.append(copy)
            sources.append(tensor)
        self._groups = list(groups.values())
        self._forms = [_FORM(t) for _, sources in self._groups for t in sources]
        self._versions = versions_of(self._others)

    @property
    def is_lost(self) -> bool:
        """Whether a tensor without a copy was written to."""
        return versions_of(self._others) != self._versions

    @torch.no_grad()
    def restore(self, only: Container[int] | None = None) -> None:
        """Restore the values, or only those of the tensors with the ids in ``only``."""
        for copies, tensors in self._groups:
            pairs = [
                (copy, tensor)
                for copy, tensor in zip(copies, tensors, strict=True)
                if only is None or id(tensor) in only
            ]
            for copy, tensor in pairs:
                if tensor.shape != copy.shape:  # an observer's grow
                    tensor.resize_(copy.shape)
            if pairs:
                sources, targets = zip(*pairs, strict=True)
                copy_at_once(torch, targets, sources)
