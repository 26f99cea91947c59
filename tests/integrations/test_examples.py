"""The examples as jobs whose memory really runs out: they end as those that have enough."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module

import integration_trainers
from robust_train.attempt.run import MicroBatchPlan
from robust_train.config.checks import unchecked
from watched_run import WatchedRun

# the step after which something happens, in the second epoch, and the job
EXAMPLES = {
    "accelerate_digits": (
        4,
        "training.epochs=3",
        "training.batch_size=512",
        "training.mixed_precision=false",
        "model.dropout=0",
        "model.width=64",
    ),
    "lightning_digits": (9, "training.epochs=2", "training.batch_size=256", "model.width=64"),
    "transformers_sonnets": (
        9,
        "training.epochs=2",
        "training.batch_size=128",
        "model.dropout=0",
        "model.width=16",
    ),
    "fsdp2_digits": (5, "training.epochs=3", "training.batch_size=512", "model.width=64"),
}
TWO_RANKS = ("num_gpus=2", "auto_device=false", "device=cpu", "training.batch_size=256")


def weights(events):
    from safetensors.torch import load_file

    last = Path([one for one in events if one["event"] == "checkpoint"][-1]["path"])
    if last.is_dir():
        return load_file(last / "model.safetensors")
    content = torch.load(last, weights_only=True)
    return content.get("state_dict") or content["model"]


@pytest.mark.proves("accelerate", "one GPU", "in the step")
@pytest.mark.proves("Lightning", "one GPU", "in the step")
@pytest.mark.proves("transformers", "one GPU", "in the step")
@pytest.mark.proves("functions (`run.backward`)", "FSDP2", "new attempt")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how", "more"),
    [
        ("accelerate_digits", "limited", ()),
        ("lightning_digits", "limited", ("isolation=none",)),
        ("transformers_sonnets", "limited", ("isolation=none",)),
        ("fsdp2_digits", "limited", TWO_RANKS),
        ("fsdp2_digits", "out_of_memory_between_steps", TWO_RANKS),
    ],
)
def test_where_memory_runs_out_an_example_ends_with_the_same_weights(
    world, tmp_path, monkeypatch, name, how, more
):
    pytest.importorskip(name.partition("_")[0].replace("fsdp2", "torch"), reason="an extra")
    at_step, *job = EXAMPLES[name]
    job += ["training.num_workers=0", "training.checkpoint_every_steps=2"]
    world.environ |= {
        # tensors come and go with the limit in the open, not kept by malloc for later
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "EXAMPLE": f"examples.{name}.train.train",
        "AT_STEP": str(at_step),
        "GROWTH_FILE": str(world.folder / "growth"),
    }
    ended = world.run(f"trainer._target_=integration_trainers.{how}", *job, *more, code=0)
    attempts = ended.attempts
    first, last = attempts[0], attempts[-1]
    assert last["outcome"] == "completed"
    changed = [e for e in ended.journal if e["event"] == "micro_batch_changed" and e["training"]]
    if how == "limited":
        assert changed[0]["before"] <= first["batch_size"]
        assert "allocate memory" in changed[0]["reason"]
        # of a sharded model memory may run out within a message, which ends the attempt
        assert len(attempts) == 1 or name == "fsdp2_digits"
    else:
        sizes = [(one["batch_size"], one["effective_batch_size"]) for one in attempts]
        assert sizes == [(256, 512), (128, 512)]
        assert last["start_step"] > 0
    if last["ranks"] == 1:
        (speed,) = last["speed"]
        assert 0 < speed["data_share"] < 1
    monkeypatch.setenv("EXAMPLE", world.environ["EXAMPLE"])
    with initialize_config_module("robust_train.configs", version_base="1.3"):
        cfg = compose("config", overrides=["device=cpu", *job])
    here = WatchedRun(tmp_path / "here")
    here.micro_batch_plan = MicroBatchPlan.of(unchecked(cfg))
    integration_trainers.example(cfg, here)
    here.finish_saving()  # as an attempt does
    found = weights(ended.journal)
    for tensor, expected in weights(here.events).items():
        assert (found[tensor] - expected).norm() <= 1e-3 * expected.norm(), tensor
