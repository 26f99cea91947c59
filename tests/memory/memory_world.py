"""Runs of the trainers in this folder."""

from __future__ import annotations

import subprocess
from typing import Any

from world import Ended, World

ON_CPU = ("auto_device=false", "device=cpu")


def start(world: World, trainer: str, *arguments: str) -> subprocess.Popen[str]:
    """Start one; the caller waits for it."""
    return world.start(f"trainer._target_=memory_trainers.{trainer}", *arguments)


def run(world: World, trainer: str, *arguments: str, **options: Any) -> Ended:
    """Run one to its end."""
    return world.run(f"trainer._target_=memory_trainers.{trainer}", *arguments, **options)
