from __future__ import annotations

import pytest

from sweep_world import SweepWorld
from world import World


@pytest.fixture
def sweeps(world: World) -> SweepWorld:
    """A folder to run sweeps in, on a machine without a GPU."""
    return SweepWorld(world)
