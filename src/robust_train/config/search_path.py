"""Who has asked for our configs: Hydra asks a plugin of ours in every program of the environment.

A program that has not asked must not find them, so the commands that want them say so before Hydra
composes. A project may name ``pkg://robust_train.configs`` in its ``hydra.searchpath`` instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

OURS = "pkg://robust_train.configs"
"""What a project finds: ``robust``, and below ``robust/`` everything else."""
OF_COMMANDS = f"{OURS}.robust"
"""What our own commands find first, so that they take ``model=lora``."""

asked_for: list[str] = []
"""What the plugin adds to the search path of each config that Hydra composes now."""


@contextlib.contextmanager
def asking_for(*paths: str) -> Iterator[None]:
    """Let Hydra find these configs of ours, behind the program's own, within the block."""
    before = asked_for[:]
    asked_for[:] = paths
    try:
        yield
    finally:
        asked_for[:] = before
