"""Combines all keys: the kernel's keys, with each feature's keys in their places among them.

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
    section: str = ""  # the section of the page that starts with this group
    is_open: bool = False  # accepts any keys; the members are the keys that this package reads

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
        after: the kernel's key that each class follows. A class without a key ends its group.
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
            # A field without metadata is not a key.
            if not item.metadata:
                continue
            members[item.name] = self._make_member(owner, item, prefix)
            members |= self._find_feature_keys(f"{prefix}{item.name}", prefix)
        if owner is not PlainConfig:
            members |= self._find_feature_keys(f"{prefix}…", prefix)
        return Group(owner, members, section, is_open)

    def _make_member(self, owner: type, item: Field[Any], prefix: str) -> Key | Group:
        about = item.metadata
        if "group" in about:
            return self._group(about["group"], f"{prefix}{item.name}.", about["section"])
        if "open" in about:
            return self._group(about["open"], f"{prefix}{item.name}.", is_open=True)
        return Key(owner, item)

    def _find_feature_keys(self, place: str, prefix: str) -> dict[str, Key | Group]:
        """Return the features' keys that follow the key ``place`` in the group ``prefix``."""
        members: dict[str, Key | Group] = {}
        for keys in self.features:
            if self._place_of(keys) != place:
                continue
            declared = fields(keys)  # type: ignore[arg-type]
            feature_members: dict[str, Key | Group] = {
                item.name: Key(keys, item) for item in declared
            }
            is_new_group = keys.group and not prefix
            if is_new_group:
                members[keys.group] = Group(keys, feature_members)
            else:
                members |= feature_members
        return members

    def _place_of(self, keys: type[FeatureKeys]) -> str:
        """Return the key that a feature's keys follow. ``…`` stands for the end of a group."""
        if keys in self.after:
            return self.after[keys]
        is_kernel_group = any(item.name == keys.group for item in fields(RobustConfig))
        return f"{keys.group}.…" if is_kernel_group else "…"


@cache
def schema() -> Schema:
    """Return every key.

    Only ``assembly.py`` lists the features, and this package must not import it. So it is loaded by
    name when keys are first needed.
    """
    composed: Schema = load_named(_SCHEMA)
    return composed


def group_of(owner: type) -> Group:
    """Return the keys that a dataclass declares, for an option of a group such as
    ``trainer=command``."""
    return Schema()._group(owner)
