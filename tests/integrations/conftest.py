from __future__ import annotations

import pytest
from jobs import Example

from world import Ended


@pytest.fixture(scope="module")
def uninterrupted(example: Example) -> Ended:
    """The module's example from start to end, its memory measured."""
    ended = example.run("measured", "uninterrupted")
    assert ended.returncode == 0, ended.output
    return ended
