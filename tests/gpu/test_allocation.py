from __future__ import annotations

import pytest

from robust_train.gpu.visible import allocated_by


@pytest.mark.parametrize(
    ("environ", "owner"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "0"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "3"}, "Slurm"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_GPUS": "0,1"}, "Slurm"),
        ({"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "1"}, "Slurm"),
        ({"SLURM_JOB_ID": "7"}, None),  # GPUs that Slurm knows nothing of
        ({"SLURM_JOB_GPUS": "3"}, None),
        ({"RAY_RAYLET_PID": "1", "CUDA_VISIBLE_DEVICES": "1"}, "Ray"),
        ({"RAY_RAYLET_PID": "1", "CUDA_VISIBLE_DEVICES": ""}, None),
        ({"RAY_RAYLET_PID": "1"}, None),  # a task that asked for no GPU
    ],
)
def test_who_has_allocated_the_gpus(environ: dict[str, str], owner: str | None):
    assert allocated_by(environ) == owner
