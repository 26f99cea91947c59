"""Plain attributes of modules, which are restored before a pass is repeated.

:mod:`.step_start` and :mod:`.pass_state` use :class:`Attributes` in the process that trains.
``keep`` reads the attributes that a :class:`_Plan` lists, and turns each value that can change in
place into a ``_Held…`` object. ``restore`` puts them back. Large tensors and long containers are
not copied. If such a value was changed in place, a warning names it, unless it has only grown.

It restores numbers, text, None, tensors that are not buffers, and lists, deques, dictionaries,
sets and small arrays of these: counters, hidden states, queues and their pointers, the states of
torchmetrics objects. Other objects are ignored.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from operator import is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from robust_train.compat import has_made, versions_of
from robust_train.readable import MIB
from robust_train.step.copies import ALWAYS_COPIED, Copies, is_small

log = logging.getLogger("robust_train")

_PLAIN = frozenset((int, float, bool, complex, str, bytes, NoneType, range, slice)) | {
    *(torch.dtype, torch.device, torch.Size),
    *(type, FunctionType, BuiltinFunctionType, MethodType),
}
_numpy: Any = sys.modules.get("numpy")  # torch does without it, too
_ARRAYS = () if _numpy is None else (_numpy.ndarray,)
_SCALARS = () if _numpy is None else (_numpy.generic,)
_CONTAINERS = frozenset((list, deque, set, dict, OrderedDict, defaultdict, Counter))
# Of a longer container only growth can be undone.
_MOST_PLAIN = 1000
_MOST_OTHERS = 200
# Lists of tensors that grow, as a metric's, are not written to in place.
_MOST_COPIED = 32
_MOST_LEVELS = 4
# After this many steps, all attributes are examined again.
_MOST_STEPS = 50
# A tensor above this may be the largest of a pass, so that the step before must not keep it.
_MOST_HELD = 16 * MIB

# Attributes that belong to nn.Module: parameters, buffers, modules, hooks, the training flag.
_OF_MODULES = frozenset(vars(nn.Module()))
# These keep their attributes in step with other ranks, streams or compiled code.
_WRAPPERS = (
    "torch.nn.parallel",
    "torch._dynamo",
    "torch.distributed.fsdp.fully_sharded",
    "torch.distributed.fsdp._common",
)


_Read = Callable[[dict[str, Any]], tuple[Any, ...]]

# Kinds of values that hold others. Other objects, such as a model's config, are not restored.
_HOLDING = (Tensor, nn.Module, tuple, *_CONTAINERS, *_ARRAYS)


class _CannotPutBackError(Exception):
    """A value of the step's start does not exist any longer."""


class _Unseen:
    """Stands for an object that is not looked at."""


_UNSEEN = _Unseen()


@dataclass(frozen=True)
class _HeldTensor:
    original: weakref.ref[Tensor]
    # The same memory without the graph of an earlier step; None: it is too large to be kept alive.
    values: Tensor | None
    version: tuple[int, int]
    is_copied: bool


@dataclass(frozen=True)
class _HeldContainer:
    # None: it may hold the graph of an earlier step, which has to end when the next one drops it.
    original: Any
    empty: Any
    items: Any


@dataclass(frozen=True)
class _HeldTuple:
    kind: type[tuple[Any, ...]]
    items: list[Any]


@dataclass(frozen=True)
class _LongContainer:
    identity: int
    length: int
    ends: tuple[int, int]


@dataclass(frozen=True)
class _HeldArray:
    original: Any
    values: Any


@dataclass(frozen=True)
class _Plan:
    """The attributes of modules to read in each step. Modules are identified by their places in the
    list, so that none is kept alive."""

    # which modules they are, and how much they have
    seen: tuple[list[int], list[int]] = ([], [])
    # The names of attributes that are a plain value, and what reads these.
    plain: tuple[tuple[int, tuple[str, ...], _Read], ...] = ()
    # The names of attributes that are more than that.
    names: tuple[tuple[int, list[str]], ...] = ()
    # Those that are None, and may be a tensor or a list in a later step.
    empty: tuple[tuple[int, list[str]], ...] = ()
    left_alone: frozenset[int] = frozenset()
    lazy: tuple[int, ...] = ()

    @classmethod
    def of(cls, modules: Sequence[nn.Module], homes: Sequence[dict[str, Any]]) -> _Plan:
        """Look at all attributes of modules."""
        plain = []
        names = []
        empty = []
        left_alone = []
        lazy = []
        for place, (module, home) in enumerate(zip(modules, homes, strict=True)):
            kind: Any = type(module)
            if _is_left_alone(kind):
                left_alone.append(place)
                if issubclass(kind, LazyModuleMixin):
                    lazy.append(place)
                continue
            held = _names_to_hold(kind, home)
            if held:
                names.append((place, held))
            others = tuple(name for name in home if name not in _OF_MODULES and name not in held)
            if others:
                plain.append((place, others, _reader_of(others)))
            none = [] if _is_torchs(kind) else _names_of_none(kind, home)
            if none:
                empty.append((place, none))
        return cls(
            _seen(modules, homes),
            tuple(plain),
            tuple(names),
            tuple(empty),
            frozenset(left_alone),
            tuple(lazy),
        )

    def read(
        self, modules: Sequence[nn.Module], homes: Sequence[dict[str, Any]]
    ) -> list[tuple[Any, ...]] | None:
        """Return the plain values of modules as they are now, or None if it does not hold for
        them."""
        if not self._is_of(modules, homes):
            return None
        try:
            return [read(homes[place]) for place, _, read in self.plain]
        except KeyError:  # Another attribute has the place of one that was deleted.
            return None

    def _is_of(self, modules: Sequence[nn.Module], homes: Sequence[dict[str, Any]]) -> bool:
        return (
            _seen(modules, homes) == self.seen
            and not any(
                homes[place].get(name) is not None for place, names in self.empty for name in names
            )
            and all(name in homes[place] for place, names in self.names for name in names)
            and all(isinstance(modules[place], LazyModuleMixin) for place in self.lazy)
        )


def _seen(
    modules: Sequence[nn.Module], homes: Sequence[dict[str, Any]]
) -> tuple[list[int], list[int]]:
    return list(map(id, modules)), list(map(len, homes))


@functools.cache
def _reader_of(names: tuple[str, ...]) -> _Read:
    """Return a function that reads attributes from a module's dictionary. A copy of the whole
    dictionary, which includes hooks, takes twice the time.

    The first name is read twice, since a single name would not give a tuple.
    """
    return itemgetter(names[0], *names)


_HELD = (_HeldTensor, _HeldContainer, _HeldTuple, _LongContainer, _HeldArray)


class Attributes:
    """The attributes of modules and their values, kept to restore them later."""

    def __init__(self, named: set[str] | None = None) -> None:
        # Names of attributes for which the warning was already logged.
        self._named = set() if named is None else named
        self._plan = _Plan()
        self._age = 0
        self._modules: list[nn.Module] = []
        self._plain: list[tuple[Any, ...]] = []
        self._held: dict[int, dict[str, Any]] = {}  # keys are positions of modules
        self._copies = Copies()
        self._small: list[Tensor | None] = []
        self._versions: list[tuple[int, int]] = []
        self._inside: list[nn.Module] = []
        self._has_passing = False

    def keep(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        """Take what ``modules`` have now as the values to go back to.

        Return the modules that are in lists and dictionaries of theirs.
        """
        self._small = []
        self._inside = []
        homes = [module.__dict__ for module in modules]
        self._age += 1
        plain = None
        if self._age <= _MOST_STEPS:
            plain = self._plan.read(modules, homes)
        if plain is None:
            self._plan = _Plan.of(modules, homes)
            self._age = 0
            plain = self._plan.read(modules, homes)
            assert plain is not None
        self._modules = list(modules)
        self._plain = plain
        held = {}
        for place, names in self._plan.names:
            held[place] = {name: self._hold(homes[place][name]) for name in names}
        self._held = held
        self._copies.take(self._small)
        self._versions = versions_of(self._small)
        return self._inside

    def drop(self) -> None:
        """Hold nothing any longer."""
        self._modules = []
        self._plain = []
        self._held = {}
        self._inside = []
        self._small = []

    def restore(self) -> None:
        """Restore the values, and name those that cannot be restored, once."""
        now = versions_of(self._small)
        both = zip(self._small, self._versions, now, strict=True)
        self._copies.restore({id(t) for t, at, now_at in both if at != now_at})
        plain = {
            place: dict(zip(names, values[1:], strict=True))
            for (place, names, _), values in zip(self._plan.plain, self._plain, strict=True)
        }
        for place, module in enumerate(self._modules):
            if place in self._plan.left_alone:
                continue
            before = plain.get(place, {}) | self._held.get(place, {})
            for name in _put_back(module, before):
                if name not in self._named:
                    self._named.add(name)
                    log.warning(
                        "%s was changed by a pass that is undone, as after running out of memory, "
                        "and cannot be put back",
                        name,
                    )

    def _hold(self, value: Any, most_copied: int = 1, level: int = 0) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is Tensor or kind is nn.Parameter:
            return self._hold_tensor(value, is_copied=most_copied > 0)
        if isinstance(value, nn.Module):
            self._inside.append(value)
            return value
        if level < _MOST_LEVELS and kind in _CONTAINERS:
            return self._hold_container(value, level)
        if level < _MOST_LEVELS and isinstance(value, tuple):
            if len(value) > _MOST_OTHERS or _PLAIN.issuperset(map(type, value)):
                return value
            return _HeldTuple(kind, self._hold_all(value, level))
        if _is_array(value):
            return _HeldArray(value, value.copy())
        return value if _is_plain(value) else _UNSEEN

    def _hold_tensor(self, tensor: Tensor, *, is_copied: bool) -> Any:
        if tensor.is_leaf and tensor.requires_grad:
            return tensor
        is_large = tensor.is_sparse or tensor.nbytes > _MOST_HELD
        values = None if is_large else tensor
        if values is not None and tensor.grad_fn is not None:
            values = tensor.detach()
        self._has_passing |= values is not tensor
        is_copied &= values is not None and is_small(tensor)
        is_copied &= not tensor.is_inference()
        if is_copied:
            self._small.append(values)
        (version,) = versions_of([tensor])
        return _HeldTensor(weakref.ref(tensor), values, version, is_copied)

    def _hold_container(self, value: Any, level: int) -> Any:
        length = len(value)
        content = value.values() if isinstance(value, dict) else value
        if length <= _MOST_PLAIN and _PLAIN.issuperset(map(type, content)):
            return _HeldContainer(value, None, copy(value))
        if length > _MOST_OTHERS:
            return _LongContainer(id(value), length, _ends_of(value, length))
        outer = self._has_passing
        self._has_passing = False
        items: Any = self._hold_all(content, level)
        if isinstance(value, dict):
            items = dict(zip(value, items, strict=True))
        original = value
        empty = None
        if self._has_passing:
            original = None
            empty = copy(value)
            empty.clear()
        self._has_passing |= outer
        return _HeldContainer(original, empty, items)

    def _hold_all(self, values: Collection[Any], level: int) -> list[Any]:
        most_copied = len(values) <= _MOST_COPIED
        held = (self._hold(value, most_copied, level + 1) for value in values)
        return [
            value if kept is _UNSEEN else kept for value, kept in zip(values, held, strict=True)
        ]


# --- going back ---


def _put_back(module: nn.Module, before: dict[str, Any]) -> Iterator[str]:
    """Restore attributes, and yield the names of those that cannot be restored."""
    home = vars(module)
    kind = type(module)
    for name in home.keys() - before.keys():
        if _is_looked_at(kind, name):
            del home[name]
    for name, held in before.items():
        is_same = name in home and home[name] is held
        if is_same or not (_is_put_back(held) and _is_looked_at(kind, name)):
            continue
        # the pass has made a parameter, a buffer or a module of it
        if name not in home and has_made(module, name):
            continue
        is_whole = True
        try:
            value, is_whole = _value_of(held, home.get(name))
            if name not in home or home[name] is not value:
                home[name] = value
        # also where a type of tuple cannot be made of its items
        except Exception:
            is_whole = False
        if not is_whole:
            yield f"{kind.__name__}.{name}"


def _value_of(held: Any, now: Any = None) -> tuple[Any, bool]:
    """Return the held value, and whether all of it is unchanged. ``now`` has its place."""
    if isinstance(held, _HeldTensor):
        tensor = held.original()
        if tensor is None:
            tensor = held.values
        if tensor is None:
            raise _CannotPutBackError
        return tensor, held.is_copied or versions_of([tensor]) == [held.version]
    if isinstance(held, _HeldTuple):
        items, is_whole = _values_of(held.items)
        make = getattr(held.kind, "_make", held.kind)
        return make(items), is_whole
    if isinstance(held, _HeldArray):
        if held.original.tobytes() != held.values.tobytes():
            held.original[...] = held.values
        return held.original, True
    if isinstance(held, _LongContainer):
        _cut_back(held, now)
        return now, True
    if not isinstance(held, _HeldContainer):
        return held, True
    target = held.original
    items = held.items
    is_whole = True
    if target is None:
        target = now if type(now) is type(held.empty) else held.empty
    if isinstance(target, dict):
        values, is_whole = _values_of(items.values())
        _fill(target, dict(zip(items, values, strict=True)))
    else:
        if not isinstance(items, set):
            items, is_whole = _values_of(items)
        _fill(target, items)
    return target, is_whole


def _values_of(items: Collection[Any]) -> tuple[list[Any], bool]:
    pairs = list(map(_value_of, items))
    return [value for value, _ in pairs], all(whole for _, whole in pairs)


def _fill(target: Any, items: Any) -> None:
    """Give a container these items, if it has others."""
    if len(target) == len(items) and all(map(is_, target, items)):
        if not isinstance(target, dict):
            return
        if all(map(is_, target.values(), items.values())):
            return
    target.clear()
    add = target.extend if isinstance(target, (list, deque)) else target.update
    add(items)


def _ends_of(value: Any, length: int) -> tuple[int, int]:
    """Return the identities of a container's first item and of item number ``length``."""
    if isinstance(value, (set, dict)):
        return 0, 0
    return id(value[0]), id(value[length - 1])


def _cut_back(held: _LongContainer, now: Any) -> None:
    """Take off what was added to a long container."""
    is_same = type(now) in _CONTAINERS and id(now) == held.identity
    if not is_same or len(now) < held.length:
        raise _CannotPutBackError
    if _ends_of(now, held.length) != held.ends:
        raise _CannotPutBackError
    if isinstance(now, set) and len(now) > held.length:
        raise _CannotPutBackError
    while len(now) > held.length:
        if isinstance(now, dict):
            now.popitem()
        else:
            now.pop()


def _names_to_hold(kind: Any, home: dict[str, Any]) -> list[str]:
    """Return the names of attributes that are more than a plain value."""
    return [
        name
        for name, value in home.items()
        if type(value) not in _PLAIN
        and _is_looked_at(kind, name)
        and isinstance(value, _HOLDING)
        and not (type(value) is tuple and _PLAIN.issuperset(map(type, value)))
    ]


def _names_of_none(kind: Any, home: dict[str, Any]) -> list[str]:
    return [name for name, value in home.items() if value is None and _is_looked_at(kind, name)]


def _is_looked_at(kind: Any, name: str) -> bool:
    """Return whether an attribute is a user's, not of nn.Module or of torch's own modules."""
    return name not in _OF_MODULES and not (name.startswith("_") and _is_torchs(kind))


@functools.cache
def _is_torchs(kind: Any) -> bool:
    # fully_shard gives a user's module a class of its own
    names = (base.__module__ for base in kind.__mro__)
    name = next(n for n in names if not n.startswith("torch.distributed."))
    return bool(name.partition(".")[0] == "torch")


@functools.cache
def _is_left_alone(kind: Any) -> bool:
    """Return whether a module's attributes belong to a framework, which restores them itself. A
    lazy module changes at its first pass, and its new attributes stay, as its weights do."""
    return issubclass(kind, LazyModuleMixin) or any(
        base.__module__.startswith(_WRAPPERS) for base in kind.__mro__
    )


def _is_put_back(held: Any) -> bool:
    if type(held) in _PLAIN or isinstance(held, (*_HELD, nn.Module, nn.Parameter)):
        return True
    return _is_plain(held) or type(held) is tuple


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number or a name of a kind of its own."""
    kinds = (int, float, complex, str, bytes, frozenset, Enum, *_SCALARS)
    return isinstance(value, kinds)


def _is_array(value: Any) -> bool:
    if type(value) not in _ARRAYS:
        return False
    return not value.dtype.hasobject and bool(value.nbytes <= ALWAYS_COPIED)
