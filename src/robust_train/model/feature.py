"""The declaration of a feature: a capability in its own folder, which can be deleted.

``assembly.py`` lists the features for every process.
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
        """Yield the conflicts of these keys with each other and with other keys of ``config``, a
        ``RobustConfig``."""
        yield from ()


@dataclass(frozen=True)
class Feature:
    """One folder of ``features/``, as :mod:`robust_train.assembly` lists it.

    Its halves and parts are dotted names (``package.module:Class``), so a process imports its own
    half and never the other half.
    """

    name: str
    # Additions to the records of the kernel, see `model.parts`.
    parts: tuple[str, ...] = field(default=(), kw_only=True)
    # A subclass of `launcher.hooks.Watch`; empty for none.
    watch: str = field(default="", kw_only=True)
    # Subclasses of `launcher.hooks.InLauncher` and `attempt.hooks.InAttempt`; empty for no part
    # there.
    launcher: str = ""
    attempt: str = ""
    # A function of a job's plan that returns the plan with what the feature knows beforehand.
    plans: str = field(default="", kw_only=True)
    # Functions of a command's arguments, by its name. They return the answer's data and lines.
    commands: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    # Read with `config.of(…)`. There are several classes if other keys stand between them on the
    # page.
    keys: tuple[type[FeatureKeys], ...] = ()


def load_named(reference: str) -> Any:
    """Import the object that ``package.module:name`` refers to."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
