"""A loop with FSDP2 as a job: ``examples/fsdp2_digits``."""

import pytest
import torch
from jobs import TWO_RANKS, Example, differ_by_rounding_alone, events

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    return Example(
        "examples.fsdp2_digits.train.train",
        (
            "training.epochs=3",
            "training.batch_size=512",
            "training.checkpoint_every_steps=2",
            "model.width=64",
        ),
        at_step=5,
        folder=tmp_path_factory.mktemp("fsdp2"),
    )


def weights(journal):
    return torch.load(events(journal, "checkpoint")[-1]["path"], weights_only=True)["model"]


def test_ranks_that_share_a_model_repeat_a_step_to_the_weights_of_one_process(example, monkeypatch):
    ended = example.run("limited", "limited", *TWO_RANKS, "training.batch_size=256")
    assert ended.returncode == 0, ended.output
    # memory that runs out within a message ends the attempt; the next one has half the batch
    assert ended.attempts[-1]["outcome"] == "completed"
    changes = events(ended.journal, "micro_batch_changed")
    assert (changes[0]["before"], changes[0]["rank"]) == (256, 1)
    here = weights(example.run_here(monkeypatch))
    differ_by_rounding_alone(weights(ended.journal), here, within=1e-3)


@pytest.mark.proves("functions (`run.backward`)", "FSDP2", "new attempt")
def test_memory_that_runs_out_between_steps_ends_the_attempt_and_the_next_has_half(
    example, monkeypatch
):
    ended = example.run(
        "out_of_memory_between_steps", "between", *TWO_RANKS, "training.batch_size=256"
    )
    assert ended.returncode == 0, ended.output
    sizes = [(a["ranks"], a["batch_size"], a["effective_batch_size"]) for a in ended.attempts]
    assert sizes == [(2, 256, 512), (2, 128, 512)]
    assert events(ended.journal, "training_started")[1]["step"] > 0
    here = weights(example.run_here(monkeypatch))
    differ_by_rounding_alone(weights(ended.journal), here, within=1e-3)
