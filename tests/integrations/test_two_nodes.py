"""Frameworks on two nodes: a rank of one node is killed, and runs out of memory after that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks_of_frameworks
import torch
import troubled_trainers
from hydra import compose, initialize_config_module
from jobs import NO_HOARDING, events

from robust_train.run import MicroBatchPlan, Run
from two_nodes import run_both
from world import World

HERE = Path(__file__).parent

KEYS = ("training.num_workers=0", "seed=3")
BUILT_IN = (
    "training.epochs=2",
    "training.mixed_precision=false",
    "model.width=4",
    "model.dropout=0",
)


def on_two_nodes(world: World, trainer: str, size: int, steps: int, *keys: str) -> Any:
    """Return a job's result after asserting that it resumed the checkpoint of so many ``steps``
    when a rank of node 1 was killed, and repeated the second step from there, for which that node
    had too little memory."""
    world.with_environ(NO_HOARDING)
    world.environ["PYTHONPATH"] = f"{HERE}:{world.environ['PYTHONPATH']}"
    target = f"trainer._target_=troubled_trainers.{trainer}"
    sizes = f"training.batch_size={size}", "min_batch_size=1", f"+killed_after={steps + 1}"
    leader, follower = run_both(world, target, *sizes, *KEYS, *keys)
    assert leader.returncode == follower.returncode == 0, leader.output + follower.output
    first, second = leader.attempts
    assert (first["outcome"], first["action"]) == ("interrupted", "retry")
    assert "killed by SIGKILL" in first["message"]
    assert (second["outcome"], second["start_step"], second["ranks"]) == ("completed", steps, 2)
    changes = [e for e in events(leader.journal, "micro_batch_changed") if e["training"]]
    changed = {(e["step"], e["before"], e["after"], e["rank"]) for e in changes}
    assert (steps + 2, size, size // 2, 1) in changed
    return leader.summary["result"]


def alone(folder: Path, trainer: str, size: int, *keys: str) -> Any:
    """Return what the same trainer does in one process that has enough memory."""
    with initialize_config_module("robust_train.configs", version_base="1.3"):
        cfg = compose("config", ["device=cpu", f"training.batch_size={2 * size}", *KEYS, *keys])
    run = Run(run_dir=folder)
    run.micro_batch_plan = MicroBatchPlan.of(cfg)
    return getattr(troubled_trainers, trainer)(cfg, run)


@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param(
            "replicated",
            marks=[
                pytest.mark.proves(
                    "functions (`run.micro_batches`)", "several machines", "in the step"
                ),
                pytest.mark.proves(
                    "functions (`run.micro_batches`)", "several machines", "new attempt"
                ),
            ],
        ),
        pytest.param("sharded", marks=pytest.mark.slow),
        pytest.param(
            "accelerate",
            marks=[
                pytest.mark.slow,
                pytest.mark.proves("accelerate", "several machines", "in the step"),
                pytest.mark.proves("accelerate", "several machines", "new attempt"),
            ],
        ),
        pytest.param(
            "lightning",
            marks=[
                pytest.mark.slow,
                pytest.mark.proves("Lightning", "several machines", "in the step"),
                pytest.mark.proves("Lightning", "several machines", "new attempt"),
            ],
        ),
        pytest.param(
            "transformers",
            marks=[
                pytest.mark.slow,
                pytest.mark.proves("transformers", "several machines", "in the step"),
                pytest.mark.proves("transformers", "several machines", "new attempt"),
            ],
        ),
    ],
)
def test_a_job_goes_on_to_the_weights_of_one_process(world: World, tmp_path: Path, trainer: str):
    """Its rank on node 1 is killed, and short of memory in the next attempt."""
    keys: tuple[str, ...] = ()
    if hasattr(ranks_of_frameworks, trainer):
        pytest.importorskip(trainer, reason=f"the extra [{trainer}] is not installed")
        keys = (f"trainer.preload_modules=[robust_train.integrations.{trainer}]",)
    result = on_two_nodes(world, trainer, 4, 3, *keys)
    assert result == pytest.approx(alone(tmp_path / "alone", trainer, 4), abs=1e-5)


@pytest.mark.proves("built-in trainer", "several machines", "in the step")
@pytest.mark.proves("built-in trainer", "several machines", "new attempt")
@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_the_built_in_trainer_does_as_well(world: World, tmp_path: Path, sharding: str):
    result = on_two_nodes(world, "built_in", 128, 6, *BUILT_IN, f"training.sharding={sharding}")
    expected = weights(alone(tmp_path / "alone", "built_in", 128, *BUILT_IN))
    for name, found in weights(result).items():
        torch.testing.assert_close(found, expected[name], rtol=0, atol=1e-5)


def weights(result: Any) -> dict[str, torch.Tensor]:
    return torch.load(result["checkpoint"], weights_only=True)["model"]
