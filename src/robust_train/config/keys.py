"""All keys together: the kernel's keys, with each feature's keys in their places among them.

Every process that reads a config calls :func:`schema`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import cache, cached_property
from typing import Any

from robust_train.config.schema import PlainConfig, RobustConfig
from robust_train.config.values import Declaration
from robust_train.model.feature import FeatureKeys, load_named

_SCHEMA = "robust_train.assembly:SCHEMA"


@dataclass(frozen=True)
class Key:
    """One key."""

    owner: type  # the dataclass that declares the key
    item: Field[Any]

    @property
    def about(self) -> Declaration:
        """The key's declaration."""
        declaration: Declaration = self.item.metadata["key"]
        return declaration


@dataclass(frozen=True)
class Group:
    """A group of keys, or the root, in the order of the page."""

    owner: type  # the dataclass that gives Hydra's node its type
    members: Mapping[str, Key | Group]
    section: str = ""  # the section of the page that starts with it
    is_open: bool = False  # takes any keys; the members are those that this package reads

    def names(self, prefix: str = "") -> Iterator[str]:
        """Yield the full names of all keys."""
        for name, member in self.members.items():
            if isinstance(member, Group):
                yield from member.names(f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}"


@dataclass(frozen=True)
class Schema:
    """Every key.

    Attributes:
        features: the classes with features' keys, in the order of the page.
        after: for each class the kernel's key that it follows; a class without a key ends its
            group.
    """

    features: Sequence[type[FeatureKeys]] = ()
    after: Mapping[type[FeatureKeys], str] = field(default_factory=dict)

    @cached_property
    def plain(self) -> Group:
        """The keys of ``train.py``."""
        return self._group(PlainConfig)

    @cached_property
    def root(self) -> Group:
        """The keys of ``train_robust.py``: all keys."""
        return self._group(RobustConfig)

    def _group(
        self, owner: type, prefix: str = "", section: str = "", *, is_open: bool = False
    ) -> Group:
        """Return a group of the kernel, with features' keys in it."""
        members: dict[str, Key | Group] = {}
        for item in fields(owner):
            if not item.metadata:  # without metadata it is not a key
                continue
            members[item.name] = self._member(owner, item, prefix)
            members |= self._of_features(f"{prefix}{item.name}", prefix)
        if owner is not PlainConfig:
            members |= self._of_features(f"{prefix}…", prefix)
        return Group(owner, members, section, is_open)

    def _member(self, owner: type, item: Field[Any], prefix: str) -> Key | Group:
        about = item.metadata
        if "group" in about:
            return self._group(about["group"], f"{prefix}{item.name}.", about["section"])
        if "open" in about:
            return self._group(about["open"], f"{prefix}{item.name}.", is_open=True)
        return Key(owner, item)

    def _of_features(self, place: str, prefix: str) -> dict[str, Key | Group]:
        """Return the features' keys that belong in this place of the group ``prefix``."""
        members: dict[str, Key | Group] = {}
        for keys in self.features:
            if self._place(keys) != place:
                continue
            declared = fields(keys)  # type: ignore[arg-type]
            members_of_class: dict[str, Key | Group] = {
                item.name: Key(keys, item) for item in declared
            }
            is_group_of_its_own = keys.group and not prefix
            if is_group_of_its_own:
                members[keys.group] = Group(keys, members_of_class)
            else:
                members |= members_of_class
        return members

    def _place(self, keys: type[FeatureKeys]) -> str:
        if keys in self.after:
            return self.after[keys]
        is_kernels = any(item.name == keys.group for item in fields(RobustConfig))
        return f"{keys.group}.…" if is_kernels else "…"


@cache
def schema() -> Schema:
    """Return every key.

    Only ``assembly.py`` lists the features, and it is above this room. So it is loaded by name when
    keys are first needed.
    """
    composed: Schema = load_named(_SCHEMA)
    return composed


def group_of(owner: type) -> Group:
    """Return the keys that a dataclass itself declares, as an option of a group does."""
    return Schema()._group(owner)
