"""Memory that an inline attempt leaves behind, or cannot release."""

import json

import pytest
import torch

from robust_train import launch
from robust_train.model.errors import TrainerFailed

pytestmark = pytest.mark.usefixtures("whole_heap")

KEPT = []
INLINE = {"isolation": "none", "auto_device": False, "device": "cpu"}


def test_an_inline_attempt_that_left_memory_behind_says_how_much(tmp_path, caplog):
    def train(cfg):
        outputs = torch.zeros(cfg.training.batch_size, 2**14)
        if cfg.training.batch_size > 32:
            KEPT.append(outputs)
            raise MemoryError
        return "trained"

    training = {"batch_size": 64, "num_workers": 0}
    summary = launch(train, {**INLINE, "training": training}, run_dir=tmp_path)
    KEPT.clear()
    assert summary.result == "trained"
    assert "4.0 MiB float32 (64, 16384) on cpu" in caplog.text
    events = [json.loads(line) for line in (tmp_path / "journal.jsonl").open()]
    (held,) = (event for event in events if event["event"] == "memory_held")
    assert "4.0 MiB more on cpu than before the first try" in held["description"]


def test_a_fault_is_reported_where_the_device_answers_nothing_after_it(tmp_path, monkeypatch):
    message = "CUDA error: an illegal memory access was encountered"

    def fails(*arguments):
        raise RuntimeError(message)

    monkeypatch.setattr("robust_train.memory.clearing.StartingMemory.describe_rest", fails)
    with pytest.raises(TrainerFailed, match="illegal memory access"):
        launch(fails, INLINE, run_dir=tmp_path)
    [attempt] = json.loads((tmp_path / "summary.json").read_text())["attempts"]
    assert attempt["outcome"] == "device_fault"
