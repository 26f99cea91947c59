"""Plans which attributes of modules to read at the start of each step.

:mod:`.attributes` makes an :class:`AttributePlan` in the process that trains, and uses it for many
steps: looking at each attribute of a thousand modules would take too long for every step. The plan
no longer holds once a module has other attributes, and a new plan is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from robust_train.step.kept_values import IMMUTABLE, RESTORED_TYPES, has_only_immutable

# Attributes that belong to nn.Module: parameters, buffers, modules, hooks, the training flag.
_OF_NN_MODULE = frozenset(vars(nn.Module()))
# Modules of these packages synchronise their attributes with other ranks, streams or compiled code.
_WRAPPERS = (
    "torch.nn.parallel",
    "torch._dynamo",
    "torch.distributed.fsdp.fully_sharded",
    "torch.distributed.fsdp._common",
)

_Read = Callable[[dict[str, Any]], tuple[Any, ...]]


@dataclass(frozen=True)
class AttributePlan:
    """The attributes of modules to read in each step.

    A module is identified by its position in the list of modules, so that no module is kept alive.
    """

    # The ids of the modules, and how many attributes each of them has.
    fingerprint: tuple[list[int], list[int]] = ([], [])
    # Per module: the names of attributes whose value cannot change in place, and a function that
    # reads them.
    immutable: tuple[tuple[int, tuple[str, ...], _Read], ...] = ()
    # Per module: the names of attributes whose value can change in place.
    mutable: tuple[tuple[int, list[str]], ...] = ()
    # Per module: the names of attributes that are None, and may be a tensor or a list in a later
    # step.
    none: tuple[tuple[int, list[str]], ...] = ()
    ignored_modules: frozenset[int] = frozenset()
    lazy_modules: tuple[int, ...] = ()

    @classmethod
    def of(cls, modules: Sequence[nn.Module], homes: Sequence[dict[str, Any]]) -> AttributePlan:
        """Make a plan for modules, whose attributes are in the dictionaries ``homes``."""
        immutable = []
        mutable = []
        none = []
        ignored = []
        lazy = []
        for position, (module, home) in enumerate(zip(modules, homes, strict=True)):
            kind: Any = type(module)
            if _restores_itself(kind):
                ignored.append(position)
                if issubclass(kind, LazyModuleMixin):
                    lazy.append(position)
                continue
            mutable_names = _mutable_names(kind, home)
            if mutable_names:
                mutable.append((position, mutable_names))
            other_names = tuple(
                name for name in home if name not in _OF_NN_MODULE and name not in mutable_names
            )
            if other_names:
                immutable.append((position, other_names, _make_reader(other_names)))
            none_names = [] if _is_of_torch(kind) else _names_of_none(kind, home)
            if none_names:
                none.append((position, none_names))
        return cls(
            _fingerprint(modules, homes),
            tuple(immutable),
            tuple(mutable),
            tuple(none),
            frozenset(ignored),
            tuple(lazy),
        )

    def read_immutable(
        self, modules: Sequence[nn.Module], homes: Sequence[dict[str, Any]]
    ) -> list[tuple[Any, ...]] | None:
        """Return the values that cannot change in place, or None if the plan no longer holds."""
        if not self._holds_for(modules, homes):
            return None
        try:
            return [read(homes[position]) for position, _, read in self.immutable]
        except KeyError:  # An attribute was deleted and another was added.
            return None

    def name_immutable(self, values: Sequence[tuple[Any, ...]]) -> dict[int, dict[str, Any]]:
        """Return a result of :meth:`read_immutable` by module and name."""
        named = {}
        for (position, names, _), values_of_module in zip(self.immutable, values, strict=True):
            named[position] = dict(zip(names, values_of_module[1:], strict=True))
        return named

    def _holds_for(self, modules: Sequence[nn.Module], homes: Sequence[dict[str, Any]]) -> bool:
        return (
            _fingerprint(modules, homes) == self.fingerprint
            and not any(
                homes[position].get(name) is not None
                for position, names in self.none
                for name in names
            )
            and all(name in homes[position] for position, names in self.mutable for name in names)
            and all(
                isinstance(modules[position], LazyModuleMixin) for position in self.lazy_modules
            )
        )


def _fingerprint(
    modules: Sequence[nn.Module], homes: Sequence[dict[str, Any]]
) -> tuple[list[int], list[int]]:
    return list(map(id, modules)), list(map(len, homes))


@functools.cache
def _restores_itself(kind: Any) -> bool:
    """Return whether a framework restores the attributes of modules of this class.

    A lazy module counts too: its first pass changes it for good, as it does its weights.
    """
    return issubclass(kind, LazyModuleMixin) or any(
        base.__module__.startswith(_WRAPPERS) for base in kind.__mro__
    )


def _mutable_names(kind: Any, home: dict[str, Any]) -> list[str]:
    return [
        name
        for name, value in home.items()
        if type(value) not in IMMUTABLE
        and is_user_attribute(kind, name)
        and isinstance(value, RESTORED_TYPES)
        and not (type(value) is tuple and has_only_immutable(value))
    ]


def _names_of_none(kind: Any, home: dict[str, Any]) -> list[str]:
    return [name for name, value in home.items() if value is None and is_user_attribute(kind, name)]


def is_user_attribute(kind: Any, name: str) -> bool:
    """Return whether an attribute of a module of class ``kind`` may be a user's.

    Attributes of nn.Module are not, nor are private attributes of torch's own modules.
    """
    return name not in _OF_NN_MODULE and not (name.startswith("_") and _is_of_torch(kind))


@functools.cache
def _is_of_torch(kind: Any) -> bool:
    for base in kind.__mro__:
        # fully_shard replaces the class of a user's module by a subclass of its own.
        if not base.__module__.startswith("torch.distributed."):
            return bool(base.__module__.partition(".")[0] == "torch")
    return False


@functools.cache
def _make_reader(names: tuple[str, ...]) -> _Read:
    """Return a function that reads attributes from a module's dictionary.

    A copy of the whole dictionary, which includes hooks, would take twice the time. The first name
    is read twice, because ``itemgetter`` returns no tuple for a single name.
    """
    return itemgetter(names[0], *names)
