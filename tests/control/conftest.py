from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from control_world import Served


@pytest.fixture
def serve() -> Iterator[Callable[[str], Served]]:
    served: list[Served] = []

    def start(run_id: str) -> Served:
        served.append(Served(run_id))
        return served[-1]

    yield start
    for one in served:
        one.server.close()
