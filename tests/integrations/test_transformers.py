"""transformers' Trainer as an attempt."""

import importlib

import pytest
import torch
from running_out import recorded

from disks import fill, small_disk
from framework_config import SILENT, framework_config
from robust_train.attempt.run import live_of
from robust_train.model.errors import TrainingDiverged, TrainingStopped, UserError
from taking_part import guarded
from watched_run import FillsTheDisk, RunOnAFullDisk, WatchedRun

transformers = pytest.importorskip(
    "transformers", reason="the extra [transformers] is not installed"
)
pytest.importorskip("accelerate", reason="the extra [transformers] is not installed")


class _Line(torch.nn.Module):
    """Takes the count of a step's items, as causal language models do."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[float] = []

    def forward(self, x, labels=None, num_items_in_batch=None, **kwargs):
        if self.training:
            self.seen += x.flatten().tolist()
        errors = (self.layer(x) - labels) ** 2
        return {"loss": errors.sum() / (num_items_in_batch or len(x))}


def _fit(
    folder, cfg, resume=None, run=None, callbacks=None, label=1.0, kind=transformers.Trainer, **more
):
    from robust_train.integrations.transformers import fit, training_arguments

    torch.manual_seed(0)
    run = run or WatchedRun(folder, resume=resume)
    arguments = transformers.TrainingArguments(
        **{
            **training_arguments(cfg, run),
            "num_train_epochs": 3,
            "learning_rate": 0.01,
            **SILENT,
            **more,
        }
    )
    samples = [{"x": [i / 22], "labels": [label]} for i in range(22)]
    model = _Line()
    data = {"train_dataset": samples, "eval_dataset": samples}
    trainer = kind(model, arguments, callbacks=callbacks, **data)
    result = fit(trainer, cfg=cfg, run=run)
    return model, result, run


def test_models_that_can_checkpoint_gradients_do(tmp_path, monkeypatch, caplog):
    cfg, turned_on = framework_config(8), []
    _fit(tmp_path / "off", cfg)
    cfg.training.gradient_checkpointing = True
    _fit(tmp_path / "cannot", cfg)
    assert "gradient_checkpointing: has no effect" in caplog.text
    monkeypatch.setattr(_Line, "supports_gradient_checkpointing", True, raising=False)

    def turn_on(self, **options):
        turned_on.append(self)

    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        monkeypatch.setattr(_Line, name, turn_on, raising=False)
    model, _, _ = _fit(tmp_path / "on", cfg)
    assert turned_on == [model]


def test_a_logged_infinite_loss_ends_the_attempt(tmp_path):
    """If it stays infinite or NaN. The Trainer's own filter would log a mean in its place."""
    run = WatchedRun(tmp_path)
    guarded(run, patience=3)
    with pytest.raises(TrainingDiverged, match="the loss is nan since step 1"):
        _fit(tmp_path, framework_config(8), run=run, label=float("nan"))


class _OwnSampler(transformers.Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.WeightedRandomSampler([1.0, 2.0] * 11, 22)


class _OwnLoader(transformers.Trainer):
    def get_train_dataloader(self):
        size = self.args.train_batch_size
        return torch.utils.data.DataLoader(
            self.train_dataset, size, shuffle=True, collate_fn=self.data_collator
        )


@pytest.mark.parametrize("kind", [_OwnSampler, _OwnLoader])
def test_a_later_epoch_resumes_with_its_samples(tmp_path, kind):
    """With those that are left, also where they are drawn from torch's own generator, which the
    epochs before have used.
    """
    how = {"kind": kind}
    whole, _, run = _fit(tmp_path / "whole", framework_config(8), **how)
    rest, _, _ = _fit(tmp_path / "rest", framework_config(8), run.saved_at[4], **how)
    assert rest.seen == whole.seen[22 + 8 :]
    assert torch.equal(rest.layer.weight, whole.layer.weight)


class _Buckets:
    """Makes the batches of a data set of 22 samples."""

    def __init__(self, size):
        self.parts = torch.arange(22).split(size)

    def __iter__(self):
        return iter([part.tolist() for part in self.parts])

    def __len__(self):
        return len(self.parts)


class _OwnBuckets(transformers.Trainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(
            self.train_dataset,
            batch_sampler=_Buckets(self.args.train_batch_size),
            collate_fn=self.data_collator,
        )


def test_custom_batches_are_warned_of_before_resuming(tmp_path, caplog):
    _, _, run = _fit(tmp_path / "whole", framework_config(8), kind=_OwnBuckets)
    assert "of the _Buckets" not in caplog.text
    _fit(tmp_path / "rest", framework_config(4, 2), run.saved_at[4], kind=_OwnBuckets)
    assert "Trainer: skips as many batches of the _Buckets" in caplog.text


def test_the_last_step_waits_for_room(tmp_path):
    """What is saved is what training has ended with, although an earlier save had failed."""
    with small_disk(tmp_path / "disk", "size=1m"):
        run = RunOnAFullDisk(tmp_path / "disk", fill(tmp_path / "disk"))
        _fit(run.run_dir, framework_config(8), run=run)
        assert list(run.saved_at) == [9]
        assert live_of(run).saving.owed is None


def test_loaded_best_weights_replace_an_unsaved_step(tmp_path, caplog):
    """They are loaded at the end, and are on the disk, which filled up afterwards."""
    how = {
        **dict.fromkeys(("eval_strategy", "save_strategy"), "steps"),
        **dict.fromkeys(("eval_steps", "save_steps"), 1),
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # those of step 1
    }
    with small_disk(tmp_path / "disk", "size=1m"):
        run = FillsTheDisk(tmp_path / "disk")
        _fit(run.run_dir, framework_config(8, checkpoint_every_steps=None), run=run, **how)
        assert live_of(run).saving.owed is None
    assert "the best is, and is loaded" in caplog.text


def test_a_second_fit_is_refused_in_one_line(tmp_path):
    _, _, run = _fit(tmp_path, framework_config(8))
    with pytest.raises(UserError, match="a second fit or loop in one job"):
        _fit(tmp_path, framework_config(8), run=run)


def test_a_finished_job_makes_no_further_step(tmp_path):
    whole, result, run = _fit(tmp_path / "whole", framework_config(8), max_steps=4)
    job = framework_config(4, 2), run.last_checkpoint
    rest, again, _ = _fit(tmp_path / "rest", *job, max_steps=4)
    assert not rest.seen
    assert torch.equal(rest.layer.weight, whole.layer.weight)
    assert again["eval_loss"] == pytest.approx(result["eval_loss"])


@pytest.mark.parametrize("ends", ["early", "by max_steps"])
def test_an_ended_job_reloads_its_best_weights(tmp_path, ends):
    """It ended within an epoch."""
    how = {
        **dict.fromkeys(("eval_strategy", "save_strategy"), "steps"),
        **dict.fromkeys(("eval_steps", "save_steps"), 1),
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # those of step 1
        "max_steps": 4 if ends == "by max_steps" else -1,
    }

    def fitted(name, resume=None):
        ending = [transformers.EarlyStoppingCallback(3)] if ends == "early" else []
        return _fit(tmp_path / name, framework_config(8), resume, callbacks=ending, **how)

    whole, _, run = fitted("whole")
    assert max(run.saved_at) == 4
    rest, _, _ = fitted("rest", run.saved_at[4])
    assert not rest.seen
    assert torch.equal(rest.layer.weight, whole.layer.weight)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"per_device_train_batch_size": 4}, "per_device_train_batch_size=4.* uses 8"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2.* uses 1"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
        ({"ignore_data_skip": True}, "ignore_data_skip=True"),
        ({"save_only_model": True}, "save_only_model=True"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last=True"),
        ({"save_on_each_node": True}, "save_on_each_node=True: .* which they share"),
    ],
)
def test_changes_of_the_training_are_refused(tmp_path, monkeypatch, option, said):
    """The message is one line."""
    if "save_on_each_node" in option:
        monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(UserError, match=said) as refused:
        _fit(tmp_path, framework_config(8), **option)
    assert "\n" not in str(refused.value)


class _AsksToStop(transformers.TrainerCallback):
    """As the launcher does on SIGTERM, in the middle of an evaluation."""

    def __init__(self, run):
        self.run = run

    def on_prediction_step(self, args, state, control, **others):
        live_of(self.run).stops.request_stop()


def test_a_stop_does_not_wait_for_evaluation(tmp_path):
    cfg = framework_config(8)
    cfg.training.checkpoint_every_steps = None
    run = WatchedRun(tmp_path)
    with pytest.raises(TrainingStopped):
        _fit(tmp_path, cfg, run=run, callbacks=[_AsksToStop(run)], eval_strategy="epoch")
    assert list(run.saved_at) == [3]
    assert not [e for e in recorded(run, "metrics") if "eval_loss" in e]

    rest, _, _ = _fit(tmp_path / "rest", framework_config(8), run.last_checkpoint)
    whole, _, _ = _fit(tmp_path / "whole", framework_config(8))
    assert rest.seen == whole.seen[22:]


def test_what_the_trainer_logs_is_recorded(tmp_path):
    _, result, run = _fit(tmp_path, framework_config(8), eval_strategy="epoch")
    evaluated = [e for e in recorded(run, "metrics") if "eval_loss" in e]
    assert [e["step"] for e in evaluated] == [3, 6, 9]
    assert result["eval_loss"] == pytest.approx(evaluated[-1]["eval_loss"])
    reported = [(e["step"], e["value"], e["mode"]) for e in run.of("report")]
    assert reported == [(e["step"], e["eval_loss"], "min") for e in evaluated]
    assert {e["total_steps"] for e in run.of("progress")} == {9}
    assert 0 < live_of(run).speed.speed().data_share < 1
    milestones = {e["milestone"] for e in run.of("memory")}
    assert {"training begins", "first step done"} <= milestones


@pytest.mark.parametrize("is_whole", [True, False])
def test_rank_0_decides_whether_a_stop_saves(tmp_path, monkeypatch, is_whole):
    """A stop within an evaluation, by what rank 0 finds on the disk; what this rank finds there is
    the opposite.
    """
    module = importlib.import_module("robust_train.integrations.transformers")

    def of_rank_0(value):
        return [is_whole if isinstance(value, bool) else value]

    monkeypatch.setattr(module, "of_all_ranks", of_rank_0)
    cfg = framework_config(8)
    cfg.training.checkpoint_every_steps = None if is_whole else 1
    run = WatchedRun(tmp_path)
    with pytest.raises(TrainingStopped):
        _fit(tmp_path, cfg, run=run, callbacks=[_AsksToStop(run)], eval_strategy="epoch")
    assert [e["step"] for e in run.of("checkpoint")] == ([] if is_whole else [1, 2, 3, 3])
