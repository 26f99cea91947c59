"""``training.batch_size=auto`` under the launcher."""

from __future__ import annotations

import pytest
import torch

from training.training_world import write_image_folder
from world import Ended, World

MIB = 2**20


def weights(ended: Ended) -> dict[str, torch.Tensor]:
    return torch.load(ended.summary["result"]["checkpoint"], weights_only=True)["model"]


def test_a_size_is_found_under_a_real_limit(world: World):
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
    world.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    world.environ["DATA_LIMIT_BYTES"] = str(300 * MIB)
    first = world.run("trainer._target_=limited_trainers.built_in", *arguments, code=0)
    (found,) = [e for e in first.journal if e["event"] == "batch_size_found"]
    size = found["batch_size"]
    assert 1 <= size < 32
    assert len(found["search"]["probes"]) <= 4
    (attempt,) = first.attempts
    assert (attempt["outcome"], attempt["batch_size"]) == ("completed", size)
    assert attempt["gradient_accumulation_steps"] * size == attempt["effective_batch_size"] == 32
    assert attempt["batch_size_found"]["measured_bytes"] == found["search"]["measured_bytes"]
    assert "micro-batch auto, effective batch 32" in first.output
    assert f"→ {size}, measured" in first.output
    assert not [e for e in first.journal if e["event"] == "micro_batch_changed"], "it really fits"


@pytest.mark.slow
def test_train_py_finds_a_size_too(world: World):
    small = ("model.width=4", "training.num_workers=0", "training.epochs=1")
    plain = world.run("training.batch_size=auto", *small, script="train.py", code=0)
    assert "training.batch_size=auto: 2 probes" in plain.output
