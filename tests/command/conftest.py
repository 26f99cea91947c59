import pytest

from command_world import CommandWorld


@pytest.fixture
def scripts(world):
    """A folder to run scripts in, on a machine without a GPU."""
    return CommandWorld(world)
