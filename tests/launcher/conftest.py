import pytest

from simulated_nvml import Gpu
from two_gpu_machine import A, B


@pytest.fixture
def two_gpus(world, cuda_machine_with):
    """GPU 0 (A) has 20000 MiB free, GPU 1 (B) has 10000."""
    machine = cuda_machine_with(
        Gpu(uuid=A, total_mib=24000, free_mib=20000), Gpu(uuid=B, total_mib=24000, free_mib=10000)
    )
    world.with_environ(machine.environ)
    return machine


@pytest.fixture
def ready(world):
    """The file in which trainers name their process once they are at work."""
    world.environ["READY_FILE"] = str(world.folder / "ready")
    return world.folder / "ready"
