"""Puts this package's configs on Hydra's search path, but only in programs that ask for them.

Hydra loads our search path plugin in every program on the machine. So the plugin only adds the
paths that a command has asked for by `asking_for`. A project may instead name
``pkg://robust_train.configs`` in its ``hydra.searchpath``.
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
    """Let Hydra find these configs of this package within the block. The program's own configs
    take precedence."""
    before = asked_for[:]
    asked_for[:] = paths
    try:
        yield
    finally:
        asked_for[:] = before
