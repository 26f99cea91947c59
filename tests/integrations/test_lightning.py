"""Lightning's Trainer as an attempt."""

import functools
import importlib
import logging
import sys

import pytest
import torch
from omegaconf import OmegaConf
from running_out import recorded
from torch.utils.data import DataLoader, TensorDataset

from disks import fill, small_disk
from forked_ranks import of_forks
from framework_config import QUIET, framework_config
from robust_train import launch
from robust_train.attempt.last_save import save_owed_checkpoint
from robust_train.attempt.run import Run, live_of
from robust_train.config.checks import unchecked
from robust_train.config.schema import RobustConfig
from robust_train.config.training_plans import MicroBatchPlan
from robust_train.model.errors import TrainingStopped, UserError
from robust_train.model.spec import AttemptSpec
from watched_run import RunOnAFullDisk, WatchedRun

lightning = pytest.importorskip("lightning", reason="the extra [lightning] is not installed")


class _Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[float] = []

    def training_step(self, batch):
        self.seen += batch[0].flatten().tolist()
        loss = self.layer(batch[0]).mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _trainer(folder, **more):
    where = {"accelerator": "cpu", "devices": 1, "default_root_dir": str(folder)}
    return lightning.Trainer(**{**where, **QUIET, "max_epochs": 1, **more})


def _loader(batch_size):
    return DataLoader(TensorDataset(torch.arange(22.0)[:, None]), batch_size, shuffle=True)


def _fit(folder, cfg, loader=None, trainer=None, resume=None, model=None, run=None, **data):
    from robust_train.integrations.lightning import fit

    torch.manual_seed(0)
    model = model or _Line()
    run = run or WatchedRun(folder, resume=resume)
    trainer = trainer or _trainer(folder, max_epochs=cfg.training.epochs)
    loader = loader or _loader(cfg.training.batch_size)
    result = fit(trainer, model, loader, cfg=cfg, run=run, **data)
    return model, result, run


def test_max_steps_ends_interrupted_and_uninterrupted_runs_alike(tmp_path):

    def trained(cfg, resume=None):
        trainer = _trainer(tmp_path, max_epochs=-1, max_steps=8)
        return _fit(tmp_path, cfg, trainer=trainer, resume=resume)

    whole, _, run = trained(framework_config(8))
    assert 0 < live_of(run).speed.speed().data_share < 1
    rest, _, _ = trained(framework_config(4, 2), run.saved_at[5])
    torch.testing.assert_close(rest.layer.weight, whole.layer.weight)
    assert rest.seen == whole.seen[-len(rest.seen) :]


def test_the_last_step_waits_for_room(tmp_path):
    """The attempt writes what Lightning gave it, once training is over."""
    with small_disk(tmp_path / "disk", "size=1m"):
        run = RunOnAFullDisk(tmp_path / "disk", fill(tmp_path / "disk"))
        _fit(run.run_dir, framework_config(8, checkpoint_every_steps=None), run=run)
        assert not run.saved_at
        save_owed_checkpoint(live_of(run))
        assert list(run.saved_at) == [3]
        assert live_of(run).saving.owed is None


def test_single_device_ddp_resumes_its_sample_order(tmp_path):
    def seen(_):
        trainers = [_trainer(tmp_path, strategy="ddp", max_steps=8, max_epochs=-1) for _ in "ab"]
        whole, _, run = _fit(tmp_path, framework_config(8), trainer=trainers[0])
        job = {"trainer": trainers[1], "resume": run.saved_at[5]}
        rest, _, _ = _fit(tmp_path, framework_config(4, 2), **job)
        return whole.seen, rest.seen

    ((whole, rest),) = of_forks(1, seen)
    assert rest == whole[22 + 2 * 8 :]


def test_weights_alone_are_not_reported_as_a_checkpoint(tmp_path):
    cfg = framework_config(4)
    cfg.training.checkpoint_every_steps = None
    only_weights = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=tmp_path / "weights", save_weights_only=True, every_n_train_steps=1, save_top_k=-1
    )
    trainer = _trainer(tmp_path, enable_checkpointing=True, callbacks=[only_weights])
    _, _, run = _fit(tmp_path, cfg, trainer=trainer)
    assert len(list((tmp_path / "weights").iterdir())) == 6
    (ours,) = run.saved_at.values()  # after the epoch
    assert ours.parent == tmp_path / "checkpoints"


def test_callbacks_write_after_a_failed_save(tmp_path):
    """A callback's own checkpoint goes where it says."""

    class CannotBeSaved(_Line):
        def on_save_checkpoint(self, checkpoint):
            if not self.seen.count(-1):
                self.seen.append(-1)
                raise RuntimeError("not now")

    kept = lightning.pytorch.callbacks.OnExceptionCheckpoint(tmp_path / "kept")
    trainer = _trainer(tmp_path, enable_checkpointing=True, callbacks=[kept])
    with pytest.raises(RuntimeError, match="not now"):
        _fit(tmp_path, framework_config(8), trainer=trainer, model=CannotBeSaved())
    assert (tmp_path / "kept" / "on_exception.ckpt").exists()


class _Manual(_Line):
    """Has two optimizers, each of which steps in every batch."""

    automatic_optimization = False

    def training_step(self, batch):
        for optimizer in self.optimizers():
            self.manual_backward(super().training_step(batch))
            optimizer.step()
            self.zero_grad()  # of both

    def configure_optimizers(self):
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.parameters()]


_TWO_BATCH_SIZES = (
    r"_Data.batch_size=16, but training.batch_size=4:.*batch_size=\$\{training.batch_size\}"
)


class _NeverSteps(_Manual):
    def training_step(self, batch):
        self.manual_backward(_Line.training_step(self, batch))


class _Data(lightning.LightningDataModule):
    """Has a batch size of its own."""

    def __init__(self, batch_size=8, *, is_hyperparameter=False):
        super().__init__()
        if is_hyperparameter:
            self.save_hyperparameters("batch_size")
        else:
            self.batch_size = batch_size

    def train_dataloader(self):
        return _loader(getattr(self, "batch_size", None) or self.hparams.batch_size)


@pytest.mark.parametrize(
    ("options", "given", "accumulation", "said"),
    [
        ({"accumulate_grad_batches": 3}, None, 1, "training.gradient_accumulation_steps"),
        ({"limit_train_batches": 2}, None, 1, "limit_train_batches=2 counts micro-batches"),
        ({"overfit_batches": 2}, None, 1, "overfit_batches=2 counts micro-batches"),
        ({}, _Manual, 2, "no attribute or hyperparameter accumulate_grad_batches"),
        ({}, _NeverSteps, 1, "no optimizer step in an epoch"),
        ({}, lambda: _Data(16), 1, _TWO_BATCH_SIZES),
        ({}, lambda: _Data(16, is_hyperparameter=True), 1, _TWO_BATCH_SIZES),
    ],
)
def test_changes_of_the_effective_batch_are_refused(tmp_path, options, given, accumulation, said):
    """The message is one line."""
    given = None if given is None else given()
    kind = "loader" if isinstance(given, _Data) else "model"
    trainer = _trainer(tmp_path, **options)
    with pytest.raises(UserError, match=said) as refused:
        _fit(tmp_path, framework_config(4, accumulation), trainer=trainer, **{kind: given})
    assert "\n" not in str(refused.value)


def test_forked_ranks_keep_lightnings_own_fit(tmp_path, caplog):
    from robust_train.integrations.lightning import adopt_fit

    trainer = _trainer(tmp_path, devices=2, strategy="ddp_fork")
    with adopt_fit(framework_config(4), Run(run_dir=tmp_path)):
        model = _Line()
        before = model.layer.weight.item()
        trainer.fit(model, _loader(4))
    assert "Trainer: starts 2 processes of its own; this fit is Lightning's own" in caplog.text
    assert model.layer.weight.item() != before, "trained in its processes"


def test_the_first_fit_that_trains_is_ours(tmp_path, caplog):
    """Not a tuner's; a later one is Lightning's own, and its checkpoints are not the job's."""
    from robust_train.integrations.lightning import adopt_fit

    class HasItsData(_Line):
        lr = 0.1
        train_dataloader = staticmethod(lambda: _loader(4))

    run, model = WatchedRun(tmp_path), HasItsData()
    trainer = _trainer(tmp_path, enable_checkpointing=True)
    with adopt_fit(framework_config(4, 2), run):
        lightning.pytorch.tuner.Tuner(trainer).lr_find(model, num_training=2)
        assert not run.saved_at
        trainer.fit(model)
        assert max(run.saved_at) == 3
        assert "Lightning's own" not in caplog.text
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, _loader(4))
        assert "only one fit of a job" in caplog.text
        assert (trainer.global_step, max(run.saved_at)) == (6, 3)
        for given, accumulates in ((1, 2), (3, 3)):
            other = _trainer(tmp_path / "other", accumulate_grad_batches=given)
            other.fit(_Line(), _loader(4))
            assert other.accumulate_grad_batches == accumulates
    assert not live_of(run).parts.keeps_batch


def test_a_second_fit_is_refused_in_one_line(tmp_path):
    _, _, run = _fit(tmp_path, framework_config(8))
    with pytest.raises(UserError, match="a second fit or loop in one job"):
        _fit(tmp_path, framework_config(8), run=run)


class _LogsItsEpoch(_Line):
    def on_train_epoch_end(self):
        self.log("current_epoch", float(self.current_epoch))


def test_the_best_checkpoint_of_earlier_attempts_is_known(tmp_path):
    """Though the logger's folder, in which it lies by default, is another one in each attempt."""
    best, saved = [], None
    for epochs in (1, 2):
        kept = lightning.pytorch.callbacks.ModelCheckpoint(monitor="current_epoch")
        trainer = _trainer(
            tmp_path,
            max_epochs=epochs,
            callbacks=[kept],
            enable_checkpointing=True,
            logger=lightning.pytorch.loggers.CSVLogger(tmp_path),
        )
        model = _LogsItsEpoch()
        _, _, run = _fit(tmp_path, framework_config(8), None, trainer, saved, model)
        saved = run.saved_at[3 * epochs]
        best.append(kept.best_model_path)
    assert "version_0" in best[0]
    assert best[1] == best[0]


@pytest.mark.slow
def test_lightning_by_its_other_name_is_adopted_too(tmp_path):
    """It is a separate package with separate classes."""

    def seen(_):
        for name in list(sys.modules):
            if name.startswith(("lightning.", "robust_train.integrations.")):
                del sys.modules[name]
        other = importlib.import_module("pytorch_lightning")
        adopt_fit = importlib.import_module("robust_train.integrations.lightning").adopt_fit

        class Line(other.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer, self.seen = torch.nn.Linear(1, 1), []

            training_step = _Line.training_step
            configure_optimizers = _Line.configure_optimizers

        seen, saved = [], None
        for size in (8, 4):
            model, run = Line(), WatchedRun(tmp_path, resume=saved)
            live_of(run).parts.split_by(MicroBatchPlan(size))
            with adopt_fit(framework_config(size, 8 // size), run):
                where = {"accelerator": "cpu", "devices": 1, "max_epochs": 1}
                other.Trainer(**where, **QUIET, default_root_dir=tmp_path).fit(model, _loader(size))
            saved = saved or run.saved_at[1]
            seen.append(model.seen)
        return seen

    ((whole, rest),) = of_forks(1, seen)
    assert len(whole) == 22
    assert rest == whole[8:]


def test_lightnings_own_checkpoint_can_be_resumed(tmp_path):
    """A checkpoint that the trainer saved itself after a step."""
    cfg = framework_config(8, epochs=2, checkpoint_every_steps=None)
    callback = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=tmp_path / "own", every_n_train_steps=1, save_top_k=-1
    )
    trainer = _trainer(tmp_path, max_epochs=2, enable_checkpointing=True, callbacks=[callback])
    whole, _, run = _fit(tmp_path, cfg, trainer=trainer)
    for step in (1, 3, 4):
        rest, _, _ = _fit(tmp_path / f"from-{step}", cfg, resume=run.saved_at[step])
        assert rest.seen == whole.seen[22 * (step // 3) + 8 * (step % 3) :], step
        assert torch.equal(rest.layer.weight, whole.layer.weight), step


class _LowersItsRate(_Line):
    """By a figure of its validation, which also ends the training: it is the same in all epochs."""

    def validation_step(self, batch):
        self.log("same", 1.0)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "same"}}


def test_resumed_epochs_do_what_follows_validation(tmp_path):
    """Rates are lowered, and what is to end early does: from a step within an epoch, from the end
    of one, and from the last.
    """

    def trained(resume=None):
        stopping = lightning.pytorch.callbacks.EarlyStopping("same", patience=2)
        trainer = _trainer(tmp_path, max_epochs=9, callbacks=[stopping], num_sanity_val_steps=0)
        job = {"trainer": trainer, "model": _LowersItsRate(), "val_dataloaders": _loader(8)}
        model, result, run = _fit(tmp_path, framework_config(8), resume=resume, **job)
        return trainer.optimizers[0].param_groups[0]["lr"], trainer.global_step, result, model, run

    *whole, model, run = trained()
    assert whole[:2] == [0.025, 9]
    for step in (5, 6, 9):
        *rest, its, _ = trained(run.saved_at[step])
        assert torch.equal(its.layer.weight, model.layer.weight), step
        assert rest[1:] == whole[1:], step
        assert rest[0] == whole[0] or step == 9


def _trains_with_its_data_s_batch(cfg, run):
    from robust_train.integrations.lightning import fit

    torch.manual_seed(0)
    model, data = _Line(), _Data()
    if run.attempt == 1 and cfg.fails:
        model.on_train_batch_end = lambda *_: torch.empty(2**46)
    trainer = _trainer(run.run_dir, max_epochs=2)
    fit(trainer, model, data, cfg=cfg, run=run)
    return [data.batch_size, trainer.accumulate_grad_batches, model.layer.weight.item()]


def test_the_data_modules_batch_size_is_the_default(tmp_path):
    cfg = {"device": "cpu", "isolation": "none", "min_batch_size": 1}
    job = _trains_with_its_data_s_batch
    whole = launch(job, cfg | {"fails": False}, run_dir=tmp_path / "whole")
    halved = launch(job, cfg | {"fails": True}, run_dir=tmp_path / "halved")
    splits = [
        (attempt.spec.batch_size, attempt.spec.gradient_accumulation_steps)
        for attempt in halved.attempts
    ]
    assert splits == [(8, 1), (4, 2)]
    assert halved.result == [4, 2, pytest.approx(whole.result[2], abs=1e-6)]


class _LimitedValidation(_Line):
    def validation_step(self, batch):
        self.log("samples", float(len(batch[0])), reduce_fx="sum")
        self.log("value", self.layer(batch[0]).mean())


def test_validation_keeps_the_first_attempts_batches(tmp_path):
    from robust_train.integrations.lightning import fit

    results = []
    for size, requested in ((8, None), (2, AttemptSpec((), 8, 1))):
        torch.manual_seed(0)
        cfg = framework_config(size, 8 // size)
        run = Run(run_dir=tmp_path / str(size))
        live_of(run).parts.set_asked(requested)
        live_of(run).parts.split_by(MicroBatchPlan.of(unchecked(cfg)))
        trainer = _trainer(run.run_dir, limit_val_batches=2)
        validation = DataLoader(_loader(8).dataset, size)
        model = _LimitedValidation()
        result = fit(trainer, model, _loader(size), cfg=cfg, run=run, val_dataloaders=validation)
        results.append((result["samples"], result["value"]))
    assert results[0] == pytest.approx(results[1], abs=1e-5)
    assert results[0][0] == 16


def test_a_sweep_reads_the_monitored_figure(tmp_path):
    """``objective`` can name another."""
    for objective, figure, mode in ((None, "value", "max"), ("samples", "samples", None)):
        run = WatchedRun(tmp_path / str(mode))
        live_of(run).configure(RobustConfig(objective=objective))
        monitor = lightning.pytorch.callbacks.EarlyStopping("value", mode="max")
        trainer = _trainer(tmp_path, callbacks=[monitor])
        job = {"trainer": trainer, "model": _LimitedValidation(), "run": run}
        _, result, _ = _fit(tmp_path, framework_config(8), val_dataloaders=_loader(8), **job)
        (reported,) = run.of("report")
        expected = (pytest.approx(result[figure]), mode)
        assert (reported["value"], reported["mode"]) == expected, f"{objective=}"
        (validated,) = recorded(run, "validation")
        expected = (3, pytest.approx(result["value"]))
        assert (validated["step"], validated["value"]) == expected, f"{objective=}"


class _HoldsAModule(_Line):
    """Saves modules and partials among its hyperparameters, as templates do."""

    def __init__(self, net, optimizer):
        super().__init__()
        self.save_hyperparameters()
        self.layer = net

    def configure_optimizers(self):
        return self.hparams.optimizer(self.parameters())


def test_modules_among_hyperparameters_can_be_resumed(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    caplog.set_level(logging.INFO, logger="lightning.pytorch")

    def model():
        torch.manual_seed(0)
        return _HoldsAModule(_Line().layer, functools.partial(torch.optim.SGD, lr=0.1))

    whole, _, run = _fit(tmp_path / "whole", framework_config(8), model=model())
    saved = run.saved_at[1]
    rest, _, _ = _fit(tmp_path / "rest", framework_config(8), model=model(), resume=saved)
    assert rest.seen == whole.seen[8:]
    assert torch.equal(rest.layer.weight, whole.layer.weight)
    assert "weights_only" not in caplog.text, "no line for each checkpoint"


def test_manual_optimization_resumes_from_any_checkpoint(tmp_path):
    """There are two optimizers."""
    whole, _, run = _fit(tmp_path / "whole", framework_config(8, epochs=2), model=_Manual())
    saved = run.saved_at
    assert list(saved) == [2, 4, 6, 8, 10, 12], "two steps in each of three batches"
    for step in (4, 6, 12):  # within an epoch, at its end, at the last
        rest, _, again = _fit(
            tmp_path / f"from-{step}",
            framework_config(8, epochs=2),
            model=_Manual(),
            resume=saved[step],
        )
        done = 22 * (step // 6) + 8 * (step % 6 // 2)
        assert rest.seen == whole.seen[2 * done :], step
        assert [e["step"] for e in again.of("training_started")] in ([step], [])
        torch.testing.assert_close(rest.layer.weight, whole.layer.weight)


def test_a_trainer_gets_devices_and_machine_count(tmp_path, monkeypatch):
    """The devices of its machine."""
    from robust_train.integrations.lightning import trainer_arguments

    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    run = Run(run_dir=tmp_path, rank=2, world_size=6)
    arguments = trainer_arguments(OmegaConf.merge(framework_config(4), {"num_gpus": 6}), run)
    assert (arguments["devices"], arguments["num_nodes"], arguments["strategy"]) == (3, 2, "ddp")


class _Validated(_Line):
    """Asks to stop in the middle of its first validation, as the launcher does on SIGTERM."""

    run: Run | None = None

    def validation_step(self, batch):
        self.log("right", 1.0)
        if self.run is not None:
            live_of(self.run).stops.request_stop()


def test_a_stop_does_not_wait_for_validation(tmp_path):
    cfg = framework_config(8, epochs=2)
    cfg.training.checkpoint_every_steps = None
    model = _Validated()
    model.run = run = WatchedRun(tmp_path)
    trainer = _trainer(tmp_path, max_epochs=2, num_sanity_val_steps=0)
    with pytest.raises(TrainingStopped):
        _fit(tmp_path, cfg, None, trainer, model=model, run=run, val_dataloaders=_loader(8))
    assert list(run.saved_at) == [3]
    assert not recorded(run, "validation")

    rest, _, _ = _fit(tmp_path / "rest", cfg, resume=run.last_checkpoint)
    whole, _, _ = _fit(tmp_path / "whole", cfg)
    assert rest.seen == whole.seen[22:]
