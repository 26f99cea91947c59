"""A sweep whose jobs span nodes, through submitit's launcher and a simulated Slurm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulated_slurm import Slurm
from sweep_world import SweepWorld
from world import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]

WORDS = ("-m", "num_nodes=2", "auto_device=false", "device=cpu", "training.num_workers=0")
ON_SLURM = ("hydra/launcher=robust_slurm", "hydra.launcher.gpus_per_node=0")


@pytest.fixture
def slurm(tmp_path: Path, sweeps: SweepWorld) -> Iterator[Slurm]:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="the extra [slurm]")
    slurm = Slurm(tmp_path / "slurm")
    sweeps.world.with_environ(slurm.environ)
    yield slurm
    slurm.end()


def last_step(job: Path) -> int:
    whole = (job / "journal.jsonl").read_text().rpartition("\n")[0]  # more is being written
    events = map(json.loads, whole.splitlines())
    return max(event["step"] for event in events if event["event"] == "progress")


def test_a_preempted_job_goes_on_on_both_nodes_and_is_not_run_again(
    sweeps: SweepWorld, slurm: Slurm
):
    """Slurm signals all processes of both nodes; node 0's puts the job back into the queue."""
    trainer = "trainer._target_=node_trainers.goes_on_once_stopped"
    words = (*WORDS, *ON_SLURM, trainer, f"hydra.sweep.dir={sweeps.folder}")
    sweep, job = sweeps.world.start(*words), sweeps.folder / "0"
    trains = [job / f"rank-{rank}-trains" for rank in range(2)]
    wait_until(lambda: all(path.exists() for path in trains), "training on both nodes")
    slurm.tell("scancel", "--signal=TERM", "100")  # comes first where a job is preempted
    before = last_step(job)
    wait_until(lambda: last_step(job) > before + 200, "training goes on", 60)
    slurm.tell("scancel", "--signal=USR2", "100")
    ended = sweeps.end(sweep)
    assert ended.returncode == 0, ended.output
    step = int((job / "rank-0-stopped").read_text())
    assert sweeps.column("result") == [[step, step]]
    assert [one["start_step"] for one in sweeps.summary(0)["attempts"]] == [step]
    assert "node 1: completed" in (job / "train_robust.node1.log").read_text()
    assert "node 1: completed" not in (job / "train_robust.log").read_text()
    ended = sweeps.world.run(*words)
    assert ended.returncode == 0, ended.output
    assert sweeps.column("reused") == [True]
    assert slurm.jobs == {"100": "COMPLETED", "101": "COMPLETED"}
    assert json.loads((job / "sweep_job.json").read_text())["status"] == "completed"
