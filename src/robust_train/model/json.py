"""Converts frozen dataclasses to JSON and back, in every process: events, records, requests."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

Json = Any  # A value of JSON's types
T = TypeVar("T")

_PLAIN = frozenset({str, int, float, bool, type(None)})
_LARGEST = 2**1023  # the largest integer that is also a float
_DRAWABLE = 2.0**63


class MalformedEventError(ValueError):
    """A JSON object does not have the expected fields or types. The message gives the reason."""


def from_json(cls: type[T], data: object) -> T:
    """Build the frozen dataclass ``cls`` from a JSON object. Unknown keys are ignored.

    Raises:
        MalformedEventError: a field is missing or has another type.
    """
    if not isinstance(data, Mapping):
        raise MalformedEventError("not an object")
    built: T = _build(cls, data, cls.__name__)
    return built


def _build(cls: type[Any], data: Mapping[str, Json], where: str) -> Any:
    hints = _hints(cls)  # type: ignore[arg-type]  # every class is hashable
    given: dict[str, Json] = {}
    for item in dataclasses.fields(cls):
        if item.name in data:
            given[item.name] = _value(hints[item.name], data[item.name], f"{where}.{item.name}")
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise MalformedEventError(f"{where} needs {item.name}")
    return cls(**given)


_hints = functools.cache(typing.get_type_hints)


def _value(hint: Any, value: Json, where: str) -> Any:
    """Convert ``value`` to a field's type, which is one of the few types that events use."""
    inner = typing.get_args(hint)
    kind = typing.get_origin(hint) or hint
    if kind in (typing.Union, types.UnionType):  # a type or None
        return None if value is None else _value(inner[0], value, where)
    if kind is Any:
        return value
    if kind is tuple and isinstance(value, (list, tuple)):
        return tuple(_value(inner[0], item, where) for item in value)
    if isinstance(value, Mapping):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            parse_as = getattr(kind, "parse", None)
            return _build(kind, value, where) if parse_as is None else parse_as(value)
        if issubclass(kind, Mapping):
            return dict(value)
    if issubclass(kind, Enum):
        with contextlib.suppress(ValueError):
            return kind(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and type(value) is int and abs(value) < _LARGEST:
        return float(value)
    if type(value) is kind:  # exactly this type: a bool is not an int
        return value
    raise MalformedEventError(
        f"{where}: {value!r} is not of type {getattr(kind, '__name__', kind)}"
    )


def as_json(value: object) -> Json:
    """Convert a value to JSON's types. A dataclass uses its ``as_json``, else all its fields."""
    if type(value) in _PLAIN:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        convert = getattr(value, "as_json", None)
        return fields_as_json(value) if convert is None else convert()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    return value


def fields_as_json(value: object) -> dict[str, Json]:
    """Convert all fields of a dataclass to JSON's types."""
    assert dataclasses.is_dataclass(value)
    return {item.name: as_json(getattr(value, item.name)) for item in dataclasses.fields(value)}


def finite(value: object) -> float | None:
    """Return ``value`` if it is a number that can be drawn, else None. Booleans are not numbers."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # A comparison with NaN is false.
        return float(value) if -_DRAWABLE < value < _DRAWABLE else None
    return None
