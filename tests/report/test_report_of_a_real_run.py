"""The report of a job that the real command ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulated_nvml import Gpu, Machine
from two_gpu_machine import A, B
from world import World


@pytest.fixture(scope="module")
def recovered(tmp_path_factory: pytest.TempPathFactory, gpu_libraries: Path):
    """Runs out of memory twice on GPU 0, first after a checkpoint, and goes on to the CPU."""
    world = World(tmp_path_factory.mktemp("recovered"))
    gpus = [Gpu(uuid=A, total_mib=24000, free_mib=20000), Gpu(uuid=B, total_mib=24000, free_mib=1)]
    world.with_environ(Machine(world.folder, gpu_libraries, gpus).environ)
    world.environ["BATCH_BUDGETS"] = json.dumps({A: 16})
    ended = world.run(
        "trainer._target_=report_trainers.within_a_budget",
        "training.batch_size=64",
        "min_batch_size=64",
        "training.lr=0.01",
    )
    assert ended.returncode == 0, ended.output
    return ended


def test_a_job_leaves_a_report(recovered):
    page = (recovered.run_dir / "report.html").read_text()
    assert "Completed in" in page
    assert "at the 3rd attempt, on the CPU with micro-batch 64" in page
    assert "Out of GPU memory on cuda:0 at micro-batch 64." in page
    assert "2.0 GiB requested, 1.2 GiB of 23.5 GiB free" in page
    assert "retried: loss=high" in page
    assert "report" not in recovered.stderr
