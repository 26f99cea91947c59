from pathlib import Path

import pytest

from world import World


class OfThisFolder(World):
    """Runs the trainers of this folder, by their names."""

    def command(self, trainer, *arguments, **options):
        target = f"trainer._target_=memory_trainers.{trainer}"
        return super().command(target, *arguments, **options)


@pytest.fixture
def own_trainers(tmp_path):
    world = OfThisFolder(tmp_path)
    world.environ["PYTHONPATH"] += f":{Path(__file__).parent}"
    return world
