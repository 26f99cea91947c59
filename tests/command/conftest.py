from __future__ import annotations

import pytest

from command_world import CommandWorld
from world import World


@pytest.fixture
def scripts(world: World) -> CommandWorld:
    """A folder to run scripts in, on a machine without a GPU."""
    return CommandWorld(world)
