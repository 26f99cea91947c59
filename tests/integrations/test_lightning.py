"""Lightning's Trainer as an attempt: ``examples/lightning_digits``."""

import functools
from pathlib import Path

import pytest
import torch
import troubled_trainers
from jobs import (
    NO_HOARDING,
    TWO_RANKS,
    Example,
    events,
    recorded,
    repeated_the_step,
)
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, TensorDataset

from framework_config import QUIET, framework_config
from robust_train import launch
from robust_train.attempt.run import MicroBatchPlan, Run
from robust_train.config.checks import unchecked
from robust_train.config.schema import RobustConfig
from robust_train.model.errors import Interrupted, UserError
from robust_train.model.spec import AttemptSpec
from watched_run import WatchedRun

lightning = pytest.importorskip("lightning", reason="the extra [lightning] is not installed")


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    return Example(
        "examples.lightning_digits.train.train",
        (
            "training.epochs=2",
            "training.batch_size=256",
            "training.num_workers=0",
            "training.checkpoint_every_steps=3",
            "model.width=64",
        ),
        at_step=9,
        folder=tmp_path_factory.mktemp("lightning"),
    )


def weights(journal):
    last = events(journal, "checkpoint")[-1]
    assert last["step"] == 12
    return torch.load(last["path"], weights_only=True)["state_dict"]


@pytest.mark.proves("Lightning", "one GPU", "in the step")
@pytest.mark.slow
def test_where_memory_runs_out_the_step_is_repeated_to_the_same_weights(example, monkeypatch):
    ended = example.run("limited", "limited", "isolation=none")
    repeated_the_step(ended)
    (speed,) = ended.attempts[-1]["speed"]
    assert 0 < speed["data_share"] < 1
    validated = recorded(ended.journal, "validation")
    assert [e["step"] for e in validated] == [6, 12]
    assert ended.summary["result"] == pytest.approx(validated[-1]["val_accuracy"])
    for name, weight in weights(example.run_here(monkeypatch)).items():
        torch.testing.assert_close(weights(ended.journal)[name], weight, rtol=1e-4, atol=1e-6)


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


def _loader(batch_size, samples=22, **more):
    data = TensorDataset(torch.arange(float(samples))[:, None])
    return DataLoader(data, batch_size, shuffle=True, **more)


def _fit(folder, cfg, loader=None, trainer=None, resume=None, model=None, run=None, **data):
    from robust_train.integrations.lightning import fit

    torch.manual_seed(0)
    model = model or _Line()
    run = run or WatchedRun(folder, resume=resume)
    trainer = trainer or _trainer(folder, max_epochs=cfg.training.epochs)
    loader = loader or _loader(cfg.training.batch_size)
    result = fit(trainer, model, loader, cfg=cfg, run=run, **data)
    return model, result, run


def test_by_max_steps_it_ends_where_an_uninterrupted_run_does(tmp_path):
    cfg = framework_config(8)
    whole, _, run = _fit(
        tmp_path / "whole", cfg, trainer=_trainer(tmp_path, max_epochs=-1, max_steps=8)
    )
    saved = run.saved_at
    for step in (2, 3, 5):
        rest, _, _ = _fit(
            tmp_path / f"from-{step}",
            framework_config(4, 2),
            trainer=_trainer(tmp_path, max_epochs=-1, max_steps=8),
            resume=saved[step],
        )
        torch.testing.assert_close(rest.layer.weight, whole.layer.weight)
        assert rest.seen == whole.seen[-len(rest.seen) :]


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


class _Manual(_Line):
    """Has two optimizers, each of which steps in every batch."""

    automatic_optimization = False

    def training_step(self, batch):
        for optimizer in self.optimizers():
            self.manual_backward(super().training_step(batch))
            optimizer.step()
            self.zero_grad()  # of both

    def configure_optimizers(self):
        return [torch.optim.SGD([one], lr=0.1) for one in self.parameters()]


class _NeverSteps(_Manual):
    def training_step(self, batch):
        self.manual_backward(_Line.training_step(self, batch))


@pytest.mark.parametrize(
    ("options", "model", "accumulation", "said"),
    [
        ({"accumulate_grad_batches": 3}, None, 1, "training.gradient_accumulation_steps"),
        ({"limit_train_batches": 2}, None, 1, "limit_train_batches=2 counts micro-batches"),
        ({"overfit_batches": 2}, None, 1, "overfit_batches=2 counts micro-batches"),
        ({}, _Manual, 2, "no attribute or hyperparameter accumulate_grad_batches"),
        ({}, _NeverSteps, 1, "no optimizer step in an epoch"),
    ],
)
def test_what_would_change_the_effective_batch_is_refused_in_one_line(
    tmp_path, options, model, accumulation, said
):
    with pytest.raises(UserError, match=said) as refused:
        _fit(
            tmp_path,
            framework_config(4, accumulation),
            trainer=_trainer(tmp_path, **options),
            model=None if model is None else model(),
        )
    assert "\n" not in str(refused.value)


def test_a_trainer_that_forks_its_ranks_keeps_lightnings_own_fit(tmp_path, caplog):
    from robust_train.integrations.lightning import adopted_fit

    trainer = _trainer(tmp_path, devices=2, strategy="ddp_fork")
    with adopted_fit(framework_config(4), Run(run_dir=tmp_path)):
        model = _Line()
        before = model.layer.weight.item()
        trainer.fit(model, _loader(4))
    assert "Trainer: starts 2 processes of its own; this fit is Lightning's own" in caplog.text
    assert model.layer.weight.item() != before, "trained in its processes"


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


def _trains_with_its_data_s_batch(cfg, run):
    from robust_train.integrations.lightning import fit

    torch.manual_seed(0)
    model, data = _Line(), _Data()
    if run.attempt == 1 and cfg.fails:
        model.on_train_batch_end = lambda *_: torch.empty(2**46)
    trainer = _trainer(run.run_dir, max_epochs=2)
    fit(trainer, model, data, cfg=cfg, run=run)
    return [data.batch_size, trainer.accumulate_grad_batches, model.layer.weight.item()]


def test_the_batch_size_of_a_data_module_is_the_job_s_where_none_is_given(tmp_path):
    cfg = {"device": "cpu", "isolation": "none", "min_batch_size": 1}
    job = _trains_with_its_data_s_batch
    whole = launch(job, cfg | {"fails": False}, run_dir=tmp_path / "whole")
    halved = launch(job, cfg | {"fails": True}, run_dir=tmp_path / "halved")
    splits = [
        (one.spec.batch_size, one.spec.gradient_accumulation_steps) for one in halved.attempts
    ]
    assert splits == [(8, 1), (4, 2)]
    assert halved.result == [4, 2, pytest.approx(whole.result[2], abs=1e-6)]


@pytest.mark.parametrize("is_hyperparameter", [True, False])
def test_two_batch_sizes_that_differ_are_refused_in_one_line(tmp_path, is_hyperparameter):
    data = _Data(16, is_hyperparameter=is_hyperparameter)
    with pytest.raises(
        UserError, match=r"_Data\.batch_size=16, but training\.batch_size=8"
    ) as refused:
        _fit(tmp_path, framework_config(8), data)
    assert "batch_size=${training.batch_size}" in str(refused.value)
    assert "\n" not in str(refused.value)


class _LimitedValidation(_Line):
    def validation_step(self, batch):
        self.log("samples", float(len(batch[0])), reduce_fx="sum")
        self.log("value", self.layer(batch[0]).mean())


def test_validation_has_the_batches_of_the_job_s_first_attempt(tmp_path):
    from robust_train.integrations.lightning import fit

    results = []
    for size, asked in ((8, None), (2, AttemptSpec((), 8, 1))):
        torch.manual_seed(0)
        cfg = framework_config(size, 8 // size)
        run = Run(run_dir=tmp_path / str(size))
        run.asked = asked
        run.micro_batch_plan = MicroBatchPlan.of(unchecked(cfg))
        trainer = _trainer(run.run_dir, limit_val_batches=2)
        validation = DataLoader(_loader(8).dataset, size)
        model = _LimitedValidation()
        found = fit(trainer, model, _loader(size), cfg=cfg, run=run, val_dataloaders=validation)
        results.append((found["samples"], found["value"]))
    assert results[0] == pytest.approx(results[1], abs=1e-5)
    assert results[0][0] == 16


def test_a_sweep_reads_the_monitored_figure_unless_objective_names_another(tmp_path):
    for objective, figure, mode in ((None, "value", "max"), ("samples", "samples", None)):
        run = WatchedRun(tmp_path / str(mode))
        run.configure(RobustConfig(objective=objective))
        monitor = lightning.pytorch.callbacks.EarlyStopping("value", mode="max")
        trainer = _trainer(tmp_path, callbacks=[monitor])
        job = {"trainer": trainer, "model": _LimitedValidation(), "run": run}
        _, found, _ = _fit(tmp_path, framework_config(8), val_dataloaders=_loader(8), **job)
        (reported,) = run.of("report")
        assert (reported["value"], reported["mode"]) == (pytest.approx(found[figure]), mode)


class _HoldsAModule(_Line):
    """Saves modules and partials among its hyperparameters, as templates do."""

    def __init__(self, net, optimizer):
        super().__init__()
        self.save_hyperparameters()
        self.layer = net

    def configure_optimizers(self):
        return self.hparams.optimizer(self.parameters())


def test_a_checkpoint_with_modules_among_its_hyperparameters_is_resumed_from(tmp_path):
    def model():
        torch.manual_seed(0)
        return _HoldsAModule(_Line().layer, functools.partial(torch.optim.SGD, lr=0.1))

    whole, _, run = _fit(tmp_path / "whole", framework_config(8), model=model())
    saved = run.saved_at[1]
    rest, _, _ = _fit(tmp_path / "rest", framework_config(8), model=model(), resume=saved)
    assert rest.seen == whole.seen[8:]
    assert torch.equal(rest.layer.weight, whole.layer.weight)


def test_manual_optimization_with_two_optimizers_goes_on_from_any_checkpoint(tmp_path):
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


@pytest.mark.proves("Lightning", "one GPU", "refused", "manual optimization")
@pytest.mark.proves("Lightning", "several GPUs", "refused", "manual optimization")
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(), TWO_RANKS], ids=["one", "two"])
@pytest.mark.parametrize("accumulates", [True, False])
def test_memory_that_runs_out_in_manual_optimization_costs_an_attempt(
    world, tmp_path, ranks, accumulates
):
    """Half a micro-batch is for a module that accumulates; others go on with the same one."""
    world.with_environ(NO_HOARDING)
    world.environ["PYTHONPATH"] = f"{Path(__file__).parent}:{world.environ['PYTHONPATH']}"
    ended = world.run(
        "trainer._target_=troubled_trainers.manual",
        "trainer.preload_modules=[robust_train.integrations.lightning]",
        f"+accumulates={str(accumulates).lower()}",
        "+is_limited=true",
        "training.batch_size=4",
        "min_batch_size=1",
        "training.checkpoint_every_steps=1",
        "training.num_workers=0",
        "seed=3",
        *ranks,
    )
    assert ended.returncode == 0, ended.output
    first, second = ended.attempts
    assert "allocate memory" in first["message"]
    # the other rank may not have marked the last one yet
    assert second["start_step"] in ({1, 2} if ranks else {2})
    sizes = (second["batch_size"], second["gradient_accumulation_steps"])
    assert (first["action"], sizes) == (
        ("halve_batch", (2, 2)) if accumulates else ("retry", (4, 1))
    )
    told = "has half the micro-batch" if accumulates else "has the same batch"
    lines = [line for line in ended.output.splitlines() if "no step is repeated" in line]
    assert all(told in line for line in lines)
    assert len(lines) == 2, "one in each attempt"
    cfg = OmegaConf.merge(
        framework_config(8 if ranks else 4), {"accumulates": False, "is_limited": False}
    )
    whole = troubled_trainers.manual(cfg, Run(run_dir=tmp_path / "whole"))
    assert ended.summary["result"] == pytest.approx(whole, abs=1e-5)


def test_a_trainer_gets_its_machine_s_devices_and_the_number_of_machines(tmp_path, monkeypatch):
    from robust_train.integrations.lightning import trainer_arguments

    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    run = Run(run_dir=tmp_path, rank=2, world_size=6)
    found = trainer_arguments(OmegaConf.merge(framework_config(4), {"num_gpus": 6}), run)
    assert (found["devices"], found["num_nodes"], found["strategy"]) == (3, 2, "ddp")


def test_a_loader_with_a_batch_size_of_its_own_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"makes batches of 5, but this attempt uses 4"):
        _fit(tmp_path, framework_config(4), _loader(5))


class _Validated(_Line):
    """Asks to stop in the middle of its first validation, as the launcher does on SIGTERM."""

    run: Run | None = None

    def validation_step(self, batch):
        self.log("right", 1.0)
        if self.run is not None:
            self.run.request_stop()


def test_a_stop_during_validation_waits_for_no_more_of_it(tmp_path):
    cfg = framework_config(8, epochs=2)
    cfg.training.checkpoint_every_steps = None
    model = _Validated()
    model.run = run = WatchedRun(tmp_path)
    trainer = _trainer(tmp_path, max_epochs=2, num_sanity_val_steps=0)
    with pytest.raises(Interrupted):
        _fit(tmp_path, cfg, None, trainer, model=model, run=run, val_dataloaders=_loader(8))
    assert list(run.saved_at) == [3]
    assert not recorded(run.events, "validation")

    rest, _, _ = _fit(tmp_path / "rest", cfg, resume=run.last_checkpoint)
    whole, _, _ = _fit(tmp_path / "whole", cfg)
    assert rest.seen == whole.seen[22:]


def test_a_checkpoint_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    _, result, run = _fit(tmp_path, framework_config(8))
    assert "training goes on" in caplog.text
    assert "train_loss" in result
    assert not run.saved_at
