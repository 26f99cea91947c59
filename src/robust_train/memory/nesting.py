"""Rebuilds nested containers around changed values, for example around the tensors of a batch.

Imports no torch. The functions that split a batch, or move its tensors to the host, call
:func:`rebuild` in the process that trains.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

DESCEND = object()
"""Returned by ``change`` to keep a container and change the values inside it instead."""


def rebuild(
    value: Any,
    change: Callable[[Any, str], Any],
    name: str = "batch",
    seen: dict[int, tuple[Any, Any]] | None = None,
) -> Any:
    """Rebuild mappings, sequences, sets and dataclasses, at any depth, around changed values.

    All containers keep their types. A value that occurs twice is changed once.

    Args:
        value: the container, or a single value.
        change: called with each value and its place, such as ``batch['x'][0]``. It returns the new
            value, or `DESCEND` to change the values inside a container.
        name: the name of ``value`` in these places.
        seen: the values rebuilt so far, by id, each with its result. Only recursive calls pass it.
    """
    if seen is None:
        seen = {}
    if id(value) in seen:
        return seen[id(value)][1]
    changed = change(value, name)
    if changed is not DESCEND:
        # Keeping the value alive prevents another object from getting its id.
        seen[id(value)] = (value, changed)
        return changed
    if isinstance(value, (tuple, set, frozenset)):
        items = []
        for index, item in enumerate(value):
            items.append(rebuild(item, change, f"{name}[{index}]", seen))
        # A named tuple takes its fields as separate arguments.
        make = getattr(value, "_make", type(value))
        return make(items)
    if isinstance(value, (Mapping, list, deque)):
        # It is copied rather than constructed, because its class may take other arguments.
        result: Any = copy.copy(value)
        seen[id(value)] = (value, result)
        keys = list(value) if isinstance(value, Mapping) else list(range(len(value)))
        for key in keys:
            result[key] = rebuild(value[key], change, f"{name}[{key!r}]", seen)
        return result
    if not is_dataclass(value) or isinstance(value, type):
        return value
    result = copy.copy(value)
    for field in fields(value):
        if hasattr(value, field.name):
            part = rebuild(getattr(value, field.name), change, f"{name}.{field.name}", seen)
            # A frozen class refuses plain assignments.
            object.__setattr__(result, field.name, part)
    return result
