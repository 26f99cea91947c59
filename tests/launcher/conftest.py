from __future__ import annotations

from collections.abc import Callable

import pytest

from simulated_nvml import Gpu, Machine
from two_gpu_machine import A, B
from world import World


@pytest.fixture
def two_gpus(world: World, cuda_machine_with: Callable[..., Machine]) -> Machine:
    """GPU 0 (A) has 20000 MiB free, GPU 1 (B) has 10000."""
    machine = cuda_machine_with(
        Gpu(uuid=A, total_mib=24000, free_mib=20000), Gpu(uuid=B, total_mib=24000, free_mib=10000)
    )
    world.with_environ(machine.environ)
    return machine
