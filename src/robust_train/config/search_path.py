"""Limits this package's configs to programs that ask for them: Hydra asks the plugin in every
program.

Commands name the configs before Hydra composes. A project may name ``pkg://robust_train.configs``
in its ``hydra.searchpath`` instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

OURS = "pkg://robust_train.configs"
"""The configs for a project: ``robust``, and below ``robust/`` everything else."""
OF_COMMANDS = f"{OURS}.robust"
"""The first configs for this package's commands, so that they accept ``model=lora``."""

asked_for: list[str] = []
"""The paths that the plugin adds to the search path of each config that Hydra composes now."""


@contextlib.contextmanager
def asking_for(*paths: str) -> Iterator[None]:
    """Let Hydra find these configs of this package, after the program's own, within the block."""
    before = asked_for[:]
    asked_for[:] = paths
    try:
        yield
    finally:
        asked_for[:] = before
