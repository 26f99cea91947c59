import pytest

from sweep_world import SweepWorld


@pytest.fixture
def sweeps(world):
    """A folder to run sweeps in, on a machine without a GPU."""
    return SweepWorld(world)
