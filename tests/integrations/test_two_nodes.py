"""Frameworks on two nodes: one rank is killed, and runs out of memory after that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import troubled_trainers
from jobs import NO_HOARDING, events
from omegaconf import OmegaConf
from running_out import CFG

from robust_train.run import MicroBatchPlan, Run
from two_nodes import run_both
from world import World

HERE = Path(__file__).parent


def proves(framework: str) -> list[Any]:
    """See proved.py, which reads the marks below."""
    return [
        pytest.mark.proves(framework, "several machines", "in the step"),
        pytest.mark.proves(framework, "several machines", "new attempt"),
    ]


def recovered(world: World, trainer: str, *keys: str, steps: int) -> Any:
    """Assert that a job of two nodes went on from the checkpoint after ``steps`` steps, when a rank
    of node 1 was killed, and repeated the second step from there, where memory ran out on that
    node; return its result."""
    world.with_environ(NO_HOARDING)
    world.environ["PYTHONPATH"] = f"{HERE}:{world.environ['PYTHONPATH']}"
    target = f"trainer._target_=troubled_trainers.{trainer}"
    words = (target, f"+killed_after={steps + 1}", "training.num_workers=0", "seed=3", *keys)
    leader, follower = run_both(world, *words)
    assert leader.returncode == follower.returncode == 0, leader.output + follower.output
    first, second = leader.attempts
    assert (first["outcome"], first["action"]) == ("interrupted", "retry")
    assert "killed by SIGKILL" in first["message"]
    assert (second["outcome"], second["start_step"], second["ranks"]) == ("completed", steps, 2)
    size = second["batch_size"]
    changes = [e for e in events(leader.journal, "micro_batch_changed") if e["training"]]
    changed = {(e["step"], e["before"], e["after"], e["rank"]) for e in changes}
    assert (steps + 2, size, size // 2, 1) in changed
    return leader.summary["result"]


def alone(trainer: str, folder: Path) -> Any:
    """What one process returns that has all the samples of a step, and memory."""
    cfg = OmegaConf.merge(CFG, {"training": {"batch_size": 8, "gradient_accumulation_steps": 1}})
    run = Run(run_dir=folder)
    run.micro_batch_plan = MicroBatchPlan.of(cfg)
    return getattr(troubled_trainers, trainer)(cfg, run)


@pytest.mark.parametrize(
    ("trainer", "framework"),
    [
        ("replicated", "robust_train.microbatch.batcher"),
        ("sharded", "torch.distributed.fsdp"),
        ("accelerate", "accelerate"),
        ("lightning", "lightning"),
        ("transformers", "transformers"),
    ],
)
def test_what_is_killed_and_short_of_memory_on_one_node_goes_on_to_the_same_weights(
    world: World, tmp_path: Path, trainer: str, framework: str
):
    pytest.importorskip(framework)
    libraries = [framework, f"robust_train.integrations.{framework}"][framework in
        ("accelerate", "lightning", "transformers")]
    preloads = f"trainer.preload_modules=[{libraries}]"
    result = recovered(world, trainer, "training.batch_size=4", preloads, steps=3)
    assert result == pytest.approx(alone(trainer, tmp_path / "alone"), abs=1e-5)
