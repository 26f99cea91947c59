"""The commands of the README with the built-in trainer, on real images in their true formats."""

import json
import re
from pathlib import Path

import pytest
import torch

from terminal_screen import showing_lines
from training.training_world import write_image_folder
from world import World


@pytest.mark.slow  # 20 epochs; the next one trains for one
def test_the_default_job_reads_real_digits(world):
    """It reads at least 97 percent of them."""
    ended = world.run()
    shows_and_leaves_what_it_should(world, ended)
    assert ended.summary["result"]["test_accuracy"] >= 0.97


def shows_and_leaves_what_it_should(world, ended):
    assert ended.returncode == 0, ended.output
    result = ended.summary["result"]
    assert "Test accuracy: " in ended.stdout
    assert str(world.run_dir) in ended.stdout
    assert torch.load(result["checkpoint"], weights_only=True)["model"]
    assert Path(ended.summary["checkpoint"]).exists()
    assert "effective batch 64" in ended.stdout
    assert "Memory - " not in ended.stdout
    assert "\r" not in ended.output, "no progress bar without a terminal"
    assert list((world.run_dir / "tensorboard").iterdir())
    state = json.loads((world.run_dir / "state.json").read_text())
    state = state["attempt"]
    assert state["end_step"] == state["total_steps"] == ended.summary["attempts"][-1]["end_step"]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120, 160])
def test_a_terminal_shows_one_status_below_whole_lines(world, columns):
    written = world.run_in_terminal("training.epochs=8", columns=columns)
    lines = [line for line in showing_lines(written, columns) if line]
    assert not [line for line in lines if "━" in line or line.startswith("running")], "it is gone"
    epochs = [line for line in lines if re.match(r"\d\d:\d\d:\d\d epoch \d/8 in ", line)]
    assert len(epochs) == 8
    assert all(line.endswith(" %") for line in epochs), "an epoch is one line"
    assert "Memory - " not in written
    middle = written[: written.index("\x1b8", written.index("━"))]
    shown = "\n".join(showing_lines(middle, columns)[-6:])
    for part in ("running 0:", "attempt 1 on the CPU", "micro-batch 64", "step ", "/184"):
        assert part in shown
    log = (world.run_dir / "train_robust.log").read_text()
    assert re.search(r"(?m)^\d\d:\d\d:\d\d epoch 8/8", log)
    assert "\x1b" not in log


def test_both_entry_points_give_the_same_result(world):
    small = ("training.epochs=1", "model.width=8", "training.batch_size=auto")
    robust = world.run(*small)
    shows_and_leaves_what_it_should(world, robust)
    final = robust.summary["result"]["checkpoint"]
    weights = torch.load(final, weights_only=True)["model"]
    plain = World(world.folder)
    plain.run_dir = world.folder / "plain"
    ended = plain.run(*small, script="train.py")
    assert ended.returncode == 0, ended.output
    assert "training.batch_size=auto: 2 probes" in ended.output
    assert plain.run_dir.joinpath("summary.json").exists(), "the same job, the same files"
    other = torch.load(plain.run_dir / "checkpoints" / "final.pt", weights_only=True)["model"]
    assert all(torch.equal(weights[name], other[name]) for name in weights)


@pytest.mark.proves("built-in trainer", "one GPU", "in the step")
def test_a_real_memory_error_repeats_only_the_step(world):
    world.environ |= {
        # freed blocks go back at once, so that the limit is one on what is held
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "EXAMPLE": "robust_train.vision.trainer.train",
        "AT_STEP": "4",
        "GROWTH_FILE": str(world.folder / "growth"),
    }
    batch = ("model.width=40", "training.batch_size=512", "training.epochs=2")
    ended = world.run("trainer._target_=integration_trainers.limited", *batch, code=0)
    assert [(a["outcome"], a["batch_size"]) for a in ended.attempts] == [("completed", 512)]
    changes = [event for event in ended.journal if event["event"] == "micro_batch_changed"]
    assert changes[0]["before"] == 512
    assert changes[0]["step"] > 4
    assert changes[-1]["last_micro_batch"] < 512
    assert "memory" in changes[0]["reason"]
    assert "the step is repeated" in ended.output


def test_a_size_is_found_under_a_real_limit(world):
    images = write_image_folder(world.folder / "images", per_class=16)
    arguments = (
        "training.batch_size=auto",
        "training.effective_batch_size=32",
        "min_batch_size=1",
        "dataset=image_folder",
        f"dataset.root={images}",
        "model.image_size=96",
        "model.width=16",
        "training.num_workers=0",
        "training.epochs=1",
    )
    world.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "DATA_LIMIT_BYTES": str(300 << 20)}
    first = world.run("trainer._target_=limited_trainers.built_in", *arguments, code=0)
    (search,) = [e for e in first.journal if e["event"] == "batch_size_found"]
    size = search["batch_size"]
    assert 1 <= size < 32
    assert len(search["search"]["probes"]) <= 4
    (attempt,) = first.attempts
    assert (attempt["outcome"], attempt["batch_size"]) == ("completed", size)
    assert attempt["gradient_accumulation_steps"] * size == attempt["effective_batch_size"] == 32
    assert attempt["batch_size_found"]["measured_bytes"] == search["search"]["measured_bytes"]
    assert "micro-batch auto, effective batch 32" in first.output
    assert f"→ {size}, measured" in first.output
    assert not [e for e in first.journal if e["event"] == "micro_batch_changed"], "it really fits"
