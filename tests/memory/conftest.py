from __future__ import annotations

from pathlib import Path

import pytest

from world import World


@pytest.fixture
def own_trainers(world: World) -> World:
    """A world that knows the trainers of this folder."""
    world.environ["PYTHONPATH"] += f":{Path(__file__).parent}"
    return world
