"""A sweep's jobs share a GPU once the first of them is measured."""

import json

import pytest

from simulated_nvml import Gpu
from world import World


@pytest.mark.slow
def test_the_second_job_joins_the_measured_first(tmp_path, cuda_machine_with):
    """Each waits for the other, so one job at a time would never end; the store learns the need."""
    machine = cuda_machine_with(Gpu(total_mib=40000))
    world = World(tmp_path).with_environ(machine.environ)
    folder = tmp_path / "sweep"
    words = ["-m", "hydra/launcher=gpu_queue", "gpu_jobs_per_device=auto", "training.lr=0.1,0.2"]
    target = "trainer._target_=measured_trainers.shares_a_gpu"
    ended = world.run(*words, target, "allow_cpu_fallback=false", f"hydra.sweep.dir={folder}")
    assert ended.returncode == 0, ended.output
    assert "2 jobs share GPUs from here on" in ended.output
    (need,) = json.loads((tmp_path / "cache/robust-train/needs.json").read_text())["jobs"].values()
    (sizes,) = need["peaks"].values()
    assert list(sizes.values()) == [3000 << 20]
