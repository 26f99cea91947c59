"""Examples as jobs whose memory really runs out: they end as those that have enough."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module

import integration_trainers
from robust_train.attempt.run import live_of
from robust_train.config.checks import unchecked
from robust_train.config.training_plans import MicroBatchPlan
from watched_run import WatchedRun

JOB = (
    "training.epochs=3",
    "training.batch_size=512",
    "training.mixed_precision=false",
    "training.num_workers=0",
    "training.checkpoint_every_steps=2",
    "model.dropout=0",
    "model.width=64",
)
TWO_RANKS = ("num_gpus=2", "auto_device=false", "device=cpu", "training.batch_size=256")


def weights(events):
    from safetensors.torch import load_file

    last = Path([event for event in events if event["event"] == "checkpoint"][-1]["path"])
    if last.is_dir():
        return load_file(last / "model.safetensors")
    return torch.load(last, weights_only=True)["model"]


@pytest.mark.proves("accelerate", "one GPU", "in the step")
@pytest.mark.proves("functions (`run.backward`)", "FSDP2", "new attempt")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how", "more"),
    [
        ("accelerate_digits", "limited", ()),
        ("fsdp2_digits", "limited", TWO_RANKS),
        ("fsdp2_digits", "out_of_memory_between_steps", TWO_RANKS),
    ],
)
def test_memory_errors_leave_an_examples_weights_unchanged(
    world, tmp_path, monkeypatch, name, how, more
):
    """In the second epoch. The example ends with the same weights."""
    world.environ |= {
        # tensors come and go with the limit in the open, not kept by malloc for later
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "EXAMPLE": f"examples.{name}.train.train",
        "AT_STEP": "4",
        "GROWTH_FILE": str(world.folder / "growth"),
    }
    ended = world.run(f"trainer._target_=integration_trainers.{how}", *JOB, *more, code=0)
    attempts = ended.attempts
    assert attempts[-1]["outcome"] == "completed"
    if how == "limited":
        first = next(event for event in ended.journal if event["event"] == "micro_batch_changed")
        assert first["before"] == attempts[0]["batch_size"]
        assert "allocate memory" in first["reason"]
        # of a sharded model memory may run out within a message, which ends the attempt
        assert len(attempts) == 1 or more == TWO_RANKS
    else:
        sizes = [(attempt["batch_size"], attempt["effective_batch_size"]) for attempt in attempts]
        assert sizes == [(256, 512), (128, 512)]
        assert attempts[-1]["start_step"] > 0
    monkeypatch.setenv("EXAMPLE", world.environ["EXAMPLE"])
    with initialize_config_module("robust_train.configs", version_base="1.3"):
        cfg = compose("config", overrides=["device=cpu", *JOB])
    here = WatchedRun(tmp_path / "here")
    live_of(here).parts.split_by(MicroBatchPlan.of(unchecked(cfg)))
    integration_trainers.example(cfg, here)
    here.finish_saving()  # as an attempt does
    actual = weights(ended.journal)
    for tensor, expected in weights(here.events).items():
        assert (actual[tensor] - expected).norm() <= 1e-3 * expected.norm(), tensor
