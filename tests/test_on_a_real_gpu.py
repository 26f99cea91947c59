"""What only a real GPU can show; skipped where there is none."""

import json

import pytest
import torch

from robust_train import find_best_device
from robust_train.gpu.inventory import read_inventory
from robust_train.readable import MIB
from world import wait_until

pytestmark = pytest.mark.gpu


def test_nvml_and_torch_describe_the_same_gpu():
    """It is the GPU that was chosen."""
    device = find_best_device(min_memory_mb=1000)
    assert device.type == "cuda"
    properties = torch.cuda.get_device_properties(device)
    told = {gpu.uuid: gpu for gpu in read_inventory(processes=False).gpus}
    gpu = told[f"GPU-{properties.uuid}"]
    free, total = torch.cuda.mem_get_info(device)
    assert gpu.name == properties.name
    assert abs(gpu.total_bytes - total) < 0.05 * total
    assert abs(gpu.free_bytes - free) < 0.05 * total


def test_the_attempt_sees_only_the_chosen_gpu(world):
    ended = world.train("sees_through_torch", code=0)
    assert ended.summary["result"] == {"uuid": ended.attempts[0]["gpu_uuid"], "count": 1}


def test_jobs_that_share_imports_use_the_gpu(world):
    """Their sweep imports torch once."""
    sweep = world.folder / "sweep"
    at_once = ("hydra/launcher=gpu_queue", "hydra.launcher.n_jobs=2", "gpu_jobs_per_device=2")
    jobs = ("-m", "seed=1,2", f"hydra.sweep.dir={sweep}")
    world.train("sees_through_torch", *jobs, *at_once, code=0)
    jobs = json.loads((sweep / "sweep.json").read_text())["jobs"]
    assert [job["result"]["count"] for job in jobs] == [1, 1]


def test_a_full_gpu_halves_the_batch(world):
    keys = ("training.batch_size=64", "max_retries=5")
    ended = world.train("fills_two_gib_of_the_gpu", *keys, code=0)
    assert [a["outcome"] for a in ended.attempts] == ["device_oom", "device_oom", "completed"]
    assert [a["batch_size"] for a in ended.attempts] == [64, 32, 16]
    assert [a["effective_batch_size"] for a in ended.attempts] == [64, 64, 64]
    assert len({a["gpu_uuid"] for a in ended.attempts}) == 1
    assert "GPU Memory Summary (cuda:" in ended.output


def test_the_built_in_trainer_learns_on_the_gpu(world):
    """It learns the digits."""
    ended = world.run("dataset=digits", code=0)
    assert ended.attempts[0]["gpu_uuid"].startswith("GPU-")
    assert ended.summary["result"]["test_accuracy"] >= 0.97


def test_an_ended_job_leaves_an_empty_gpu(world):
    def free():
        return {gpu.uuid: gpu.free_bytes for gpu in read_inventory(processes=False).gpus}

    before = free()
    ended = world.train("fills_two_gib_of_the_gpu", "training.batch_size=16")
    uuid = ended.attempts[0]["gpu_uuid"]
    # in a container, NVML lists processes by other numbers, or none
    wait_until(lambda: free()[uuid] > before[uuid] - 64 * MIB, "the memory is released")
