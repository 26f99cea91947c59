"""Values that a pass may change in place, kept in a form from which they can be restored.

:mod:`.attributes` uses :class:`ValueKeeper` and :func:`restore_value` in the process that trains.
A list, for example, is kept as a :class:`KeptContainer`: the list object itself and a copy of its
items. Restoring it fills the same list again, so every holder of the list sees the old items.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection
from copy import copy
from dataclasses import dataclass
from enum import Enum
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from robust_train.compat import versions_of
from robust_train.readable import MIB
from robust_train.step.copies import ALWAYS_COPIED, Copies, is_small

# NumPy is optional: its types count only if the program imported it.
_numpy: Any = sys.modules.get("numpy")
_ARRAYS = () if _numpy is None else (_numpy.ndarray,)
_SCALARS = () if _numpy is None else (_numpy.generic,)

# Types whose values never change in place, so that the value itself is enough.
IMMUTABLE = frozenset((int, float, bool, complex, str, bytes, NoneType, range, slice)) | {
    *(torch.dtype, torch.device, torch.Size),
    *(type, FunctionType, BuiltinFunctionType, MethodType),
}
_IMMUTABLE_BASES = (int, float, complex, str, bytes, frozenset, Enum, *_SCALARS)
_CONTAINERS = frozenset((list, deque, set, dict, OrderedDict, defaultdict, Counter))
# Other types, such as a model's config, are not restored.
RESTORED_TYPES = (Tensor, nn.Module, tuple, *_CONTAINERS, *_ARRAYS)

# The items of a longer container are not copied, so only its growth can be undone.
_MAX_IMMUTABLE_ITEMS = 1000
_MAX_ITEMS = 200
# Longer lists of tensors, for example in a metric, only grow, so their tensors need no copy.
_MAX_COPIED_TENSORS = 32
_MAX_DEPTH = 4
# A larger tensor may be the largest of a pass, so it must not outlive the step that made it.
_MAX_KEPT_BYTES = 16 * MIB


class CannotRestoreError(Exception):
    """A value from the start of the step no longer exists."""


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that is not a parameter."""

    original: weakref.ref[Tensor]
    # The same memory without the graph of an earlier step. None: it is too large to keep alive.
    values: Tensor | None
    version: tuple[int, int]
    is_copied: bool


@dataclass(frozen=True)
class KeptContainer:
    """A container and the items to fill it with."""

    # None: the container may hold the graph of an earlier step, and would keep that graph alive.
    original: Any
    empty: Any  # an empty container of the same kind, if there is no original
    items: Any


@dataclass(frozen=True)
class KeptTuple:
    """A tuple with items that may change in place."""

    kind: type[tuple[Any, ...]]
    items: list[Any]


@dataclass(frozen=True)
class LongContainer:
    """A container that is too long to copy. Items that are added to it can be removed again."""

    identity: int
    length: int
    ends: tuple[int, int]  # ids of the first and the last item


@dataclass(frozen=True)
class KeptArray:
    """A NumPy array and a copy of its values."""

    original: Any
    values: Any


_KEPT = (KeptTensor, KeptContainer, KeptTuple, LongContainer, KeptArray)


class _Ignored:
    """Stands for an object that is not restored."""


_IGNORED = _Ignored()


class ValueKeeper:
    """Turns values into their kept forms.

    Attributes:
        small_tensors: the tensors that :meth:`copy_tensors` copies.
        modules: the modules that the values contain.
    """

    def __init__(self, copies: Copies) -> None:
        self.small_tensors: list[Tensor | None] = []
        self.modules: list[nn.Module] = []
        self._copies = copies  # whose memory is used again in each step
        # Whether the container in progress holds a tensor that must not outlive its step.
        self._has_short_lived = False
        self._versions: list[tuple[int, int]] = []

    def keep(self, value: Any, *, may_copy: bool = True, depth: int = 0) -> Any:
        """Return the kept form of a value.

        Args:
            may_copy: False for tensors in a long list, which are not copied.
            depth: the number of containers around the value.
        """
        kind = type(value)
        if kind in IMMUTABLE:
            return value
        if kind is Tensor or kind is nn.Parameter:
            return self._keep_tensor(value, may_copy=may_copy)
        if isinstance(value, nn.Module):
            self.modules.append(value)
            return value
        if depth < _MAX_DEPTH and kind in _CONTAINERS:
            return self._keep_container(value, depth)
        if depth < _MAX_DEPTH and isinstance(value, tuple):
            if len(value) > _MAX_ITEMS or has_only_immutable(value):
                return value
            return KeptTuple(kind, self._keep_items(value, depth))
        if _is_small_array(value):
            return KeptArray(value, value.copy())
        return value if _is_immutable(value) else _IGNORED

    def copy_tensors(self) -> None:
        """Copy the small tensors, once all values are kept."""
        self._copies.take(self.small_tensors)
        self._versions = versions_of(self.small_tensors)

    def restore_tensors(self) -> None:
        """Restore the values of the small tensors that have changed since they were copied."""
        versions_now = versions_of(self.small_tensors)
        changed = set()
        for tensor, before, now in zip(
            self.small_tensors, self._versions, versions_now, strict=True
        ):
            if before != now:
                changed.add(id(tensor))
        self._copies.restore(changed)

    def _keep_tensor(self, tensor: Tensor, *, may_copy: bool) -> Any:
        if tensor.is_leaf and tensor.requires_grad:
            return tensor
        is_large = tensor.is_sparse or tensor.nbytes > _MAX_KEPT_BYTES
        values = None if is_large else tensor
        if values is not None and tensor.grad_fn is not None:
            values = tensor.detach()
        if values is not tensor:
            self._has_short_lived = True
        is_copied = may_copy and values is not None
        is_copied = is_copied and is_small(tensor) and not tensor.is_inference()
        if is_copied:
            self.small_tensors.append(values)
        (version,) = versions_of([tensor])
        return KeptTensor(weakref.ref(tensor), values, version, is_copied)

    def _keep_container(self, container: Any, depth: int) -> Any:
        length = len(container)
        content = container.values() if isinstance(container, dict) else container
        if length <= _MAX_IMMUTABLE_ITEMS and has_only_immutable(content):
            return KeptContainer(container, None, copy(container))
        if length > _MAX_ITEMS:
            return LongContainer(id(container), length, _ids_of_ends(container, length))
        outer_has_short_lived = self._has_short_lived
        self._has_short_lived = False
        items: Any = self._keep_items(content, depth)
        if isinstance(container, dict):
            items = dict(zip(container, items, strict=True))
        original = container
        empty = None
        if self._has_short_lived:
            original = None
            empty = copy(container)
            empty.clear()
        self._has_short_lived |= outer_has_short_lived
        return KeptContainer(original, empty, items)

    def _keep_items(self, items: Collection[Any], depth: int) -> list[Any]:
        may_copy = len(items) <= _MAX_COPIED_TENSORS
        result = []
        for item in items:
            kept = self.keep(item, may_copy=may_copy, depth=depth + 1)
            result.append(item if kept is _IGNORED else kept)
        return result


def has_only_immutable(items: Collection[Any]) -> bool:
    """Return whether no item can change in place, judged by its exact type."""
    return IMMUTABLE.issuperset(map(type, items))


def _ids_of_ends(container: Any, length: int) -> tuple[int, int]:
    """Return the ids of a container's first item and of item number ``length``."""
    if isinstance(container, (set, dict)):
        return 0, 0
    return id(container[0]), id(container[length - 1])


def _is_small_array(value: Any) -> bool:
    if type(value) not in _ARRAYS:
        return False
    return not value.dtype.hasobject and bool(value.nbytes <= ALWAYS_COPIED)


def _is_immutable(value: Any) -> bool:
    """Return whether a value is a number, a text or an enum, also of a subclass."""
    return isinstance(value, _IMMUTABLE_BASES)


# --- restoring ---


def can_restore(kept: Any) -> bool:
    """Return whether a kept value can be restored. Objects of other types are ignored."""
    if type(kept) in IMMUTABLE or type(kept) is tuple:
        return True
    return isinstance(kept, (*_KEPT, nn.Module, nn.Parameter)) or _is_immutable(kept)


def restore_value(kept: Any, current: Any = None) -> tuple[Any, bool]:
    """Return the value that was kept, and whether all of it is as it was.

    Args:
        kept: a result of :meth:`ValueKeeper.keep`.
        current: the value that stands in its place now.

    Raises:
        CannotRestoreError: the value no longer exists, or has changed and has no copy.
    """
    match kept:
        case KeptTensor():
            tensor = kept.original()
            if tensor is None:
                tensor = kept.values
            if tensor is None:
                raise CannotRestoreError
            return tensor, kept.is_copied or versions_of([tensor]) == [kept.version]
        case KeptTuple():
            items, is_whole = _restore_items(kept.items, _items_of(current))
            make = getattr(kept.kind, "_make", kept.kind)
            return make(items), is_whole
        case KeptArray():
            if kept.original.tobytes() != kept.values.tobytes():
                kept.original[...] = kept.values
            return kept.original, True
        case LongContainer():
            _remove_growth(kept, current)
            return current, True
        case KeptContainer():
            return _restore_container(kept, current)
    return kept, True


def _restore_container(kept: KeptContainer, current: Any) -> tuple[Any, bool]:
    container = kept.original
    if container is None:
        container = current if type(current) is type(kept.empty) else kept.empty
    items = kept.items
    is_whole = True
    if isinstance(container, dict):
        current_items = [container.get(key) for key in items]
        values, is_whole = _restore_items(items.values(), current_items)
        items = dict(zip(items, values, strict=True))
    elif not isinstance(items, set):
        items, is_whole = _restore_items(items, _items_of(container))
    _fill(container, items)
    return container, is_whole


def _items_of(current: Any) -> list[Any]:
    return list(current) if isinstance(current, (list, tuple, deque)) else []


def _restore_items(kept_items: Collection[Any], current: list[Any]) -> tuple[list[Any], bool]:
    """Return the values that were kept, and whether all are as they were.

    A long container has no copy, so it is restored from the object that stands in its place now.
    A tuple passes on the objects in the places of its items.
    """
    values = []
    all_whole = True
    for number, kept in enumerate(kept_items):
        in_its_place = None
        if isinstance(kept, (LongContainer, KeptTuple)) and number < len(current):
            in_its_place = current[number]
        value, is_whole = restore_value(kept, in_its_place)
        values.append(value)
        all_whole = all_whole and is_whole
    return values, all_whole


def _fill(container: Any, items: Any) -> None:
    """Replace a container's items, unless it has exactly these."""
    if len(container) == len(items) and all(map(is_, container, items)):
        if not isinstance(container, dict):
            return
        if all(map(is_, container.values(), items.values())):
            return
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(items)
    else:
        container.update(items)


def _remove_growth(kept: LongContainer, current: Any) -> None:
    """Remove the items that were added to a long container."""
    is_same = type(current) in _CONTAINERS and id(current) == kept.identity
    if not is_same or len(current) < kept.length:
        raise CannotRestoreError
    if _ids_of_ends(current, kept.length) != kept.ends:
        raise CannotRestoreError
    if isinstance(current, set) and len(current) > kept.length:
        raise CannotRestoreError
    while len(current) > kept.length:
        if isinstance(current, dict):
            current.popitem()
        else:
            current.pop()
