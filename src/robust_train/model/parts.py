"""Records that features extend: an attempt has notes, its spec has knobs, its failure has findings.

A feature declares a part in its ``record.py``, a frozen dataclass whose fields all have defaults.
Code that can import its class reads it with ``record.of(SlowNote)``. Rules and the report must not
import a feature that may be deleted, so they ask for a figure by its name. In files, the fields of
all parts are among the record's own fields. Every process that reads a record uses this module.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, TypeVar

from robust_train.model.feature import Feature, load_named
from robust_train.model.json import Json, MalformedEventError, as_json, fields_as_json, from_json

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """A feature's addition to a record. Created without arguments, it has no content."""

    # The field of the record that these fields follow in files. Empty if no file contains them.
    written_after: ClassVar[str] = ""


P = TypeVar("P", bound=Part)
P2 = TypeVar("P2", bound=Part)
R = TypeVar("R", bound="Record[Any]")


def parts_like(base: type[P]) -> list[type[P]]:
    """Return the declared parts of this kind, in the order of ``FEATURES``."""
    return [part for part in load_parts() if issubclass(part, base)]


@functools.cache
def load_parts() -> tuple[type[Part], ...]:
    """Load the modules of all parts and return the parts. The list of features is loaded by its
    name, because every reader of a file needs it, and only ``assembly.py`` may name a feature."""
    features: tuple[Feature, ...] = load_named("robust_train.assembly:FEATURES")
    return tuple(load_named(name) for feature in features for name in feature.parts)


@functools.cache
def _places(record: type[Record[Any]]) -> Sequence[tuple[str, Sequence[type[Part]]]]:
    """Return the fields of a record in the order of files, each with the parts that follow it."""
    following: dict[str, list[type[Part]]] = {item.name: [] for item in fields(record)}
    del following["parts"]
    for kind in parts_like(record.kind_of_part):
        if kind.written_after:
            following[kind.written_after].append(kind)
    return list(following.items())


@dataclass(frozen=True)
class Record(Generic[P]):
    """A frozen dataclass to which features add parts of one kind, ``kind_of_part``."""

    kind_of_part: ClassVar[type[Part]]

    # The parts with content, at most one of each class, by name.
    parts: tuple[P, ...] = field(default=(), kw_only=True)

    def of(self, kind: type[P2]) -> P2:
        """Return the part of this class, without content if the record has none."""
        for part in self.parts:
            if isinstance(part, kind):
                return part
        return kind()

    def having(self: R, *parts: Part) -> R:
        """Return the record with these parts, which replace parts of the same classes."""
        of_class = {type(part): part for part in (*self.parts, *parts)}
        kept = [part for kind, part in of_class.items() if part != kind()]
        return replace(self, parts=tuple(sorted(kept, key=lambda part: type(part).__name__)))

    def noted(self, name: str, otherwise: T) -> T:
        """Return the figure with this name from the parts, or ``otherwise`` if no part has it, for
        example because its feature was deleted."""
        for part in self.parts:
            if name in part.__dataclass_fields__:
                figure: T = getattr(part, name)
                return figure
        return otherwise

    def with_same(self: R, name: str, other: R) -> R:
        """Copy the part with the figure ``name`` from ``other``."""
        kinds = {
            type(part) for part in (*self.parts, *other.parts) if name in part.__dataclass_fields__
        }
        return self.having(*(other.of(kind) for kind in kinds))

    def fields_as_json(self, leave_out: Collection[str] = ()) -> dict[str, Json]:
        """Return the fields in JSON's types, including those of all parts."""
        flat: dict[str, Json] = {}
        for name, kinds in _places(type(self)):  # type: ignore[arg-type]  # it is hashable
            if name not in leave_out:
                flat[name] = as_json(getattr(self, name))
            for kind in kinds:
                flat |= fields_as_json(self.of(kind))
        return flat

    @classmethod
    def from_fields(cls: type[R], data: Json) -> R:
        """Parse :meth:`fields_as_json`.

        Raises:
            MalformedEventError: it is not such an object.
        """
        if not isinstance(data, Mapping):
            raise MalformedEventError("not an object")
        kinds = [kind for kind in parts_like(cls.kind_of_part) if kind.written_after]
        record = from_json(cls, {**data, "parts": ()})
        return record.having(*(from_json(kind, data) for kind in kinds))
