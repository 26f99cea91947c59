from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hosts import Host

from simulated_nvml import Machine


@pytest.fixture
def host_with(machine_with: Callable[..., Machine]) -> Iterator[Callable[..., Host]]:
    """Makes a host with the GPUs given."""
    hosts: list[Host] = []

    def build(*gpus: Any) -> Host:
        hosts.append(Host(machine_with(*gpus)))
        return hosts[-1]

    yield build
    for host in hosts:
        for member in host.members:  # all of them first: who waits would go on with what is freed
            member.kill()
        for member in host.members:
            member.kill_children()
