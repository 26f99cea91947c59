"""A world whose jobs run the trainers of ``memory_trainers``."""

import pytest

from world import World


class MemoryWorld(World):
    """Runs these trainers, by their names."""

    def command(self, trainer, *arguments, **options):
        target = f"trainer._target_=memory_trainers.{trainer}"
        return super().command(target, *arguments, **options)


@pytest.fixture
def own_trainers(tmp_path):
    """A folder to run trainers that fill memory in."""
    return MemoryWorld(tmp_path)
