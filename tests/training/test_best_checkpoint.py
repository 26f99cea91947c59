"""``best.pt``: the best checkpoint stays, whatever is saved after it."""

import errno
import json
import os

import pytest
import torch
from training_world import WatchedRun, config, train

from robust_train import launch
from robust_train.folder.best import Best, keep_if_best, read_best
from robust_train.model.errors import UserError

CFG = {"device": "cpu", "isolation": "none", "training": {"keep_checkpoints": 1}}
RATED = [0.1, 0.9, float("nan"), 0.3]


def saves_rated_states(cfg, run):
    state = {"step": 0}
    for step in range(run.load(state) + 1, len(cfg.rated) + 1):
        state["step"] = step
        run.save(
            {"weight": torch.full((2,), float(step))}, step, cfg.rated[step - 1], mode=cfg.wants
        )
    return 1.0


def best_of(run_dir):
    content = torch.load(run_dir / "checkpoints" / "best.pt", weights_only=True)
    return content["weight"].tolist()


@pytest.mark.parametrize(("mode", "step"), [("max", 2), ("min", 1)])
def test_the_best_checkpoint_stays_and_is_named(tmp_path, mode, step):
    summary = launch(saves_rated_states, CFG | {"rated": RATED, "wants": mode}, run_dir=tmp_path)
    assert best_of(tmp_path) == [step, step]
    checkpoints = tmp_path / "checkpoints"
    assert not (checkpoints / "step-00000002.pt").exists(), "only the newest is kept beside it"
    assert summary.checkpoint == checkpoints / "step-00000004.pt"
    named = json.loads((tmp_path / "summary.json").read_text())["best"]
    assert named == {
        "path": str(checkpoints / "best.pt"),
        "value": RATED[step - 1],
        "step": step,
        "figure": "metric",
        "mode": mode,
        "schema": 1,
    }


def test_the_last_lines_name_the_best_checkpoint(tmp_path, caplog):
    with caplog.at_level("INFO", "robust_train"):
        launch(saves_rated_states, CFG | {"rated": RATED, "wants": "max"}, run_dir=tmp_path)
    path = tmp_path / "checkpoints" / "best.pt"
    assert f"best checkpoint: {path} (metric 0.9 after step 2)" in caplog.text


def test_a_job_without_a_metric_has_no_best(tmp_path):
    launch(saves_rated_states, CFG | {"rated": [None], "wants": "max"}, run_dir=tmp_path)
    assert "best" not in json.loads((tmp_path / "summary.json").read_text())
    assert not (tmp_path / "checkpoints" / "best.pt").exists()


def test_an_unknown_mode_is_refused_in_one_line(tmp_path):
    config_of_job = CFG | {"rated": [1.0], "wants": "largest"}
    with pytest.raises(UserError, match=r"mode='largest'\): must be 'max' or 'min'"):
        launch(saves_rated_states, config_of_job, run_dir=tmp_path)


def test_a_disk_without_second_names_has_a_copy(tmp_path, monkeypatch):
    def refuse(*paths):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    checkpoint = tmp_path / "step-00000003.pt"
    checkpoint.write_bytes(b"weights")
    keep_if_best(checkpoint, Best(0.5, 3))
    checkpoint.unlink()
    assert (tmp_path / "best.pt").read_bytes() == b"weights"
    assert read_best(tmp_path) == Best(0.5, 3)


def test_the_best_checkpoint_stays_until_a_better_one(tmp_path):
    for step, value in enumerate((0.5, 0.5, 0.4, 0.6), 1):
        checkpoint = tmp_path / f"step-{step:08d}.pt"
        checkpoint.write_bytes(b"%d" % step)
        keep_if_best(checkpoint, Best(value, step))
        expected = b"4" if step == 4 else b"1"
        assert (tmp_path / "best.pt").read_bytes() == expected, f"step {step}"


@pytest.mark.slow
def test_the_built_in_trainer_keeps_its_best_weights(tmp_path):
    short = ("training.epochs=2", "training.batch_size=512", "model.width=8")
    run = WatchedRun(tmp_path)
    train(config(*short), run)
    accuracies = [event["metrics"]["val_accuracy"] for event in run.of("epoch")]
    best = read_best(run.checkpoint_dir)
    assert (best.value, best.figure) == (max(accuracies), "validation_accuracy")
    content = torch.load(run.checkpoint_dir / "best.pt", weights_only=True)
    assert content["validation_accuracy"] == max(accuracies)
    final = torch.load(run.checkpoint_dir / "final.pt", weights_only=True)
    assert content["model"].keys() == final["model"].keys()
