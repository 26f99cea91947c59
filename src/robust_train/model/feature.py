"""Declares what a feature is: a capability in its own folder, which can be deleted.

Each folder of ``features/`` declares one :class:`Feature`. ``assembly.py`` lists them, and every
process loads from that list the parts that it needs.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


class FeatureKeys:
    """Base of the keys that a feature declares in a frozen dataclass in its ``model.py``."""

    group: ClassVar[str] = ""
    """The config group that contains the keys, empty for the root."""

    def mistakes(self, config: Any) -> Iterator[str]:
        """Yield a sentence for each conflict of these keys with each other or with other keys.

        Args:
            config: the whole ``RobustConfig``.
        """
        yield from ()


@dataclass(frozen=True)
class Feature:
    """Names the parts of one folder of ``features/``.

    The names are dotted (``package.module:Class``), so that the launcher imports only the parts for
    the launcher, and an attempt only the parts for an attempt. An empty name means no such part.
    """

    name: str
    # Additions to the records of the kernel, see `model.parts`.
    parts: tuple[str, ...] = field(default=(), kw_only=True)
    # A subclass of `launcher.hooks.Watch`.
    watch: str = field(default="", kw_only=True)
    # Subclasses of `launcher.hooks.InLauncher` and `attempt.hooks.InAttempt`.
    launcher: str = ""
    attempt: str = ""
    # A function that takes a job's plan and returns the plan changed for this feature.
    plans: str = field(default="", kw_only=True)
    # Functions by the name of a command. Each takes the command's arguments, and returns the
    # answer's data and lines.
    commands: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    # The feature's keys, which `config.of(…)` returns. A feature has several classes if keys of
    # other features stand between them on the page of keys.
    keys: tuple[type[FeatureKeys], ...] = ()


def load_named(reference: str) -> Any:
    """Import the object that ``package.module:name`` refers to."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
