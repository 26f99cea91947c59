"""Real jobs with a planted fault end as without it where they can, and say so where they cannot."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

import diverging_trainers
from robust_train.attempt.checkpoint_records import CheckpointRecords
from robust_train.attempt.run import Run, live_of
from robust_train.features.divergence.attempt import Losses
from robust_train.features.divergence.model import DivergenceKeys
from robust_train.folder.checkpoints import (
    Manifest,
    newest_checkpoint,
    of_job,
    record_checkpoint,
    rotate,
)
from robust_train.model.errors import TrainingDiverged
from taking_part import guarded

TRAINER = "trainer._target_=diverging_trainers.train"
SLOW = pytest.mark.slow


def trained(world, fault, how, *overrides):
    job = (TRAINER, f"+fault='{fault}'", f"+how='{how}'", "device=cpu", "training.lr=0.01")
    return world.run(*job, *overrides)


def without_launcher(folder, fault, how, lr=0.01):
    """What the same training ends with where nothing looks at its losses."""
    cfg = SimpleNamespace(fault=fault, how=how, training=SimpleNamespace(lr=lr))
    return diverging_trainers.train(cfg, Run(run_dir=folder / "reference"))


def outcomes(ended):
    return [attempt["outcome"] for attempt in ended.attempts]


@pytest.mark.parametrize(
    ("fault", "how"), [("bad", "step"), pytest.param("overflow", "fused", marks=SLOW)]
)
def test_a_bad_batch_costs_only_its_own_update(world, tmp_path, fault, how):
    ended = trained(world, fault, how)
    assert outcomes(ended) == ["completed"], ended.output
    assert ended.attempts[0]["skipped_updates"] == 1
    skipped = [line for line in ended.journal if line["event"] == "update_skipped"]
    assert [(update["step"], update["in_a_row"]) for update in skipped] == [(17, 1)]
    assert ended.summary["result"] == without_launcher(tmp_path, "left out", how)


SAID = {
    # the checkpoint of step 20 is saved while the loss is not finite already
    "bad once": "the checkpoint before it is step-015.pt (step 15)",
    "damage": "step-025.pt is torn; it is not used",
}


@pytest.mark.parametrize(
    ("fault", "how", "overrides", "ends", "back_to"),
    [
        ("bad once", "plain", "divergence.patience=6", "diverged", 15),
        ("bad once", "recorded late", "divergence.patience=6", "diverged", 15),
        pytest.param("bad once", "silent", "divergence.patience=6", "diverged", 15, marks=SLOW),
        pytest.param("damage", "plain", "device=cpu", "interrupted", 20, marks=SLOW),
    ],
)
def test_a_diverged_job_resumes_from_before_the_fault(
    world, tmp_path, fault, how, overrides, ends, back_to
):
    """It ends as a job without the fault does."""
    ended = trained(world, fault, how, overrides)
    assert outcomes(ended) == [ends, "completed"], ended.output
    assert Path(ended.attempts[1]["resumed_from"]).name == f"step-{back_to:03d}.pt"
    assert SAID[fault] in ended.output + ended.attempts[0]["message"]
    assert ended.summary["result"] == without_launcher(tmp_path, "none", how)


@pytest.mark.slow
def test_a_learning_rate_too_high_is_lowered(world, tmp_path):
    """This needs a trainer that reads the rate."""
    ended = trained(world, "lr", "plain", "training.lr=2")
    assert outcomes(ended) == ["diverged", "completed"], ended.output
    assert "from the beginning with 0.5 times the learning rate" in ended.output
    assert ended.summary["result"] == without_launcher(tmp_path, "lr", "plain", lr=1.0)


@pytest.mark.slow
def test_giving_up_names_step_loss_and_checkpoint(world):
    ended = trained(world, "bad", "constant lr")
    assert ended.returncode == 1
    assert outcomes(ended) == ["diverged", "diverged"], ended.output
    assert ended.summary["status"] == "failed"
    reason = ended.summary["reason"]
    assert "the loss is nan since step 17; the last good loss was" in reason
    assert "at step 16; the checkpoint before it is step-015.pt (step 15)" in reason
    assert "Traceback" not in ended.output
    assert ended.summary["checkpoint"].endswith("step-015.pt")


@pytest.mark.slow
def test_with_ignore_it_trains_on(world):
    ended = trained(world, "bad", "plain", "divergence.action=ignore")
    assert outcomes(ended) == ["completed"]
    assert ended.summary["result"] == [None] * 5


@pytest.mark.slow
def test_a_script_restarts_with_a_lower_learning_rate(world):
    argv = f"[{sys.executable},{diverging_trainers.__file__},'{{learning_rate}}']"
    script = ("trainer=command", f"trainer.argv={argv}", "training.lr=0.2", "device=cpu")
    ended = world.run(*script)
    assert outcomes(ended) == ["diverged", "completed"], ended.output
    assert ended.summary["result"] == pytest.approx(0.1)


@pytest.mark.slow
def test_the_built_in_trainer_recovers_from_divergence(world):
    """It skips updates and tries a lower learning rate."""
    overrides = ("training.lr=1e30", "training.max_grad_norm=0", "training.epochs=1")
    # on a slow machine a checkpoint of the only good step would be due
    overrides += ("training.checkpoint_every_minutes=60",)
    ended = world.run(*overrides, "device=cpu", "max_retries=1")
    assert outcomes(ended) == ["diverged", "diverged"], ended.output
    assert ended.attempts[0]["skipped_updates"] == 10
    assert ended.attempts[1]["lr_factor"] == 0.5


# --- the rules ---


def after(losses, plan):
    seen = Losses()
    for step, loss in enumerate(losses, start=1):
        seen = seen.after(step, loss, plan)
    return seen


def test_only_a_loss_that_stays_bad_has_diverged():
    plan, nan = DivergenceKeys(patience=3), float("nan")
    assert after([1.0, nan, nan, 1.0, nan, nan], plan).why_diverged(plan) == ""
    diverged = after([1.0, 0.5, nan, float("inf"), nan], plan).why_diverged(plan)
    assert diverged == "the loss is nan since step 3; the last good loss was 0.5 at step 2"


def test_lasting_spikes_count_if_they_are_asked_for():
    noise = [1.0 + 0.01 * (number % 7) for number in range(40)]
    plan = DivergenceKeys(patience=2, spike_sigma=6.0)
    high = [*noise, *[5.0] * 20]
    assert after([*high[:-1], 1.0], plan).why_diverged(plan) == ""
    assert "far above its median, since step 41" in after(high, plan).why_diverged(plan)
    assert after(high, DivergenceKeys()).why_diverged(DivergenceKeys()) == ""


def saved(folder, *checkpoints):
    for step, loss in checkpoints:
        path = folder / f"step-{step}.pt"
        path.parent.mkdir(exist_ok=True)
        path.write_text("content")
        record_checkpoint(folder, Manifest("j", 1, step, path, loss=loss))


@pytest.mark.parametrize(
    ("losses", "left"),
    [
        ("finite finite finite finite", [1, 3, 4]),
        ("proven finite finite finite", [1, 3, 4]),
        ("proven proven finite finite", [2, 3, 4]),
        ("finite diverged diverged diverged", [1, 4]),
        ("unknown unknown unknown unknown", [3, 4]),
    ],
)
def test_rotation_keeps_the_last_checkpoint_known_good(tmp_path, losses, left):
    saved(tmp_path, *enumerate(losses.split(), start=1))
    rotate(tmp_path, "j", keep=2)
    assert [manifest.step for manifest in of_job(tmp_path, "j")] == left


def test_no_checkpoint_saved_after_divergence_is_resumed(tmp_path):
    saving = CheckpointRecords(tmp_path, 1)
    saving.job = "j"
    saved(saving.folder, (10, "finite"), (20, "finite"), (30, "finite"), (40, "diverged"))
    before = saving.spoil(good_step=25, since=0.0)
    assert before.step == 20
    assert [manifest.loss for manifest in of_job(saving.folder, "j")] == [
        "proven",
        "proven",
        "diverged",
        "diverged",
    ]
    # what was followed by finite losses is not doubted where the next attempt diverges at once
    assert saving.spoil(good_step=19, since=0.0).step == 20
    assert newest_checkpoint(saving.folder, "j").step == 20


def test_a_checkpoint_is_proven_by_a_hundred_steps(tmp_path):
    run = Run(run_dir=tmp_path)
    guard, saving = guarded(run), live_of(run).saving
    saving.job, guard.losses = "j", Losses(good_step=115)
    saved(saving.folder, (10, "finite"), (16, "finite"), (20, "finite"), (30, "finite"))
    saving.rotate(1)
    assert [manifest.step for manifest in of_job(saving.folder, "j")] == [10, 30]
    guard.losses = Losses(good_step=130)
    saving.rotate(1)
    assert [manifest.step for manifest in of_job(saving.folder, "j")] == [30]


@pytest.mark.parametrize("number", [float, torch.tensor, numpy.float32])
def test_a_loss_of_any_library_is_looked_at(tmp_path, number):
    run = Run(run_dir=tmp_path)
    guarded(run, patience=2)

    def train():
        for step, loss in enumerate((1.0, float("nan"), float("nan"), 1.0), start=1):
            run.progress(step, loss=number(loss))

    with pytest.raises(TrainingDiverged, match="the loss is nan since step 2"):
        train()


def test_a_fused_optimizer_counts_skips_a_step_later(tmp_path):
    """It raises after too many of them."""
    reported = []
    run = Run(run_dir=tmp_path, report=reported.append)
    guarded(run, patience=1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before = model.weight.clone()
    bad = torch.full((4, 2), float("nan"))

    def train():
        for step in range(1, 9):
            run.backward(lambda x: model(x).mean(), bad, model)
            run.step(optimizer)
            run.progress(step)

    with pytest.raises(TrainingDiverged, match="4 updates in a row from step 1 on"):
        train()
    assert run.last_step == 4, "seen in the fifth step"
    assert torch.equal(model.weight, before)
