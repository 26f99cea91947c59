from __future__ import annotations

import pytest

from world import World

pytest_plugins = ["simulated_nvml.fixtures"]


@pytest.fixture
def world(tmp_path: pytest.TempPathFactory) -> World:
    """A folder to run the real commands in, on a machine without a GPU."""
    return World(tmp_path)
