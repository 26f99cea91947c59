"""Lightning's Trainer repeats the step in which memory runs out, in smaller parts."""

import itertools
from types import SimpleNamespace

import pytest
import running_out
import torch
from running_out import RUN_OUT, Fuse, differ_by_rounding_alone, ends_the_attempt
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from framework_config import QUIET
from robust_train.integrations import lightning_step
from robust_train.step import part_runner
from robust_train.step.batcher import MicroBatcher

lightning = pytest.importorskip("lightning", reason="the extra [lightning] is not installed")
torchmetrics = pytest.importorskip("torchmetrics")


class Net(lightning.LightningModule):
    def __init__(self, fuse):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), fuse, torch.nn.Linear(8, 2))
        self.hooks: list[str] = []
        self.outputs: list[tuple] = []

    def _loss(self, batch):
        x, y = batch
        return functional.mse_loss(self.layers(x), y, reduction="none").mean(1)

    def training_step(self, batch, batch_idx):
        losses = self._loss(batch)
        self.log("train", losses.mean(), on_step=True, on_epoch=True)
        self.log("largest", losses.max(), on_step=True, on_epoch=False, reduce_fx="max")
        # without rounding, whatever the weights are
        self.log("positive", (batch[0] > 0).float().mean(), on_step=False, on_epoch=True)
        return {"loss": losses.mean(), "losses": losses.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert len(outputs["losses"]) == len(batch[0])
        logged = self.trainer.callback_metrics
        self.outputs.append(
            (float(outputs["loss"]), float(logged["largest"]), float(logged["train_step"]))
        )

    def on_before_zero_grad(self, optimizer):
        self.hooks.append("zero_grad")

    def on_before_optimizer_step(self, optimizer):
        self.hooks.append("step")

    def validation_step(self, batch, batch_idx):
        losses = self._loss(batch)
        self.log("val", losses.mean(), on_step=True, on_epoch=True)
        return self._loss(batch)

    test_step = validation_step

    def predict_step(self, batch):
        return self.layers(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def loader(count=23, size=4):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, 4, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :2] ** 2), size, shuffle=True)


ORDERED = DataLoader(loader(7).dataset, 4)


class Fitted(running_out.Fitted):
    def __init__(self, folder, model, batch_size=4, epochs=1):
        from robust_train.integrations.lightning import fit

        super().__init__(folder, model, batch_size)
        self.trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            default_root_dir=str(folder),
            num_sanity_val_steps=0,
            **QUIET,
            gradient_clip_val=0.5 if model.automatic_optimization else None,
            max_epochs=epochs,
        )
        data = loader(size=batch_size)
        self.result = fit(
            self.trainer, model, data, cfg=self.cfg, run=self.run, val_dataloaders=loader(7)
        )


def test_memory_errors_change_neither_weights_nor_logs(tmp_path):
    """Wherever memory runs out, weights, hooks and logs are those of a run with enough of it."""
    whole = Fitted(tmp_path, Net(Fuse()))
    assert whole.model.hooks == ["zero_grad", "step"] * 3
    # the third batch is the first of step 2; the last one has three samples
    for where, at in itertools.product(("forward", "backward"), (3, 4, 5)):
        fuse = Fuse(where, at, fits=2)
        split = Fitted(tmp_path, Net(fuse))
        assert split.changed(training=True) == [((at + 1) // 2, 4, 2)], (where, at)
        again = at - 1 if at == 4 else at  # the step's batches so far
        split_checked = fuse.of_a_split_check(4)
        assert fuse.sizes[at:] == split_checked + [2] * 2 * (6 - again) + [1, 2], (where, at)
        differ_by_rounding_alone(split.weights, whole.weights)
        assert split.model.hooks == whole.model.hooks, (where, at)
        for output, other in zip(split.model.outputs, whole.model.outputs, strict=True):
            assert output == pytest.approx(other, abs=1e-6), (where, at)
        assert split.result == pytest.approx(whole.result, abs=1e-6), (where, at)
        assert split.result["positive"] == whole.result["positive"], ("to the bit", where, at)
        assert split.trainer.global_step == whole.trainer.global_step, (where, at)
    # the batches of a short step keep their weights when its last one runs out
    split = Fitted(tmp_path, Net(Fuse("forward", 6, fits=1)))
    assert split.changed(training=True) == [(3, 3, 2), (3, 2, 1)]
    differ_by_rounding_alone(split.weights, whole.weights)


def test_an_evaluation_repeats_the_failed_batch(tmp_path):
    """The batch in which memory ran out."""
    fuse = Fuse(training=False)
    whole = Fitted(tmp_path, Net(fuse))
    assert fuse.sizes == [4, 4, 3, 3], "it is validated once"
    # in the second pass of the second batch, whose first one has logged already
    fuse = Fuse("forward", 4, fits=2, training=False)
    split = Fitted(tmp_path, Net(fuse))
    assert fuse.sizes[:8] == [4, 4, 3, 3, 1, 1, 2, 2], "the second batch has three"
    assert not split.changed(training=True)
    ((_, before, after),) = split.changed(training=False)
    assert (before, after) == (3, 2)
    assert split.result == pytest.approx(whole.result, abs=1e-6)
    prediction, other = (fitted.trainer.predict(fitted.model, ORDERED) for fitted in (split, whole))
    torch.testing.assert_close(prediction, other)
    (figures,), (other,) = (
        fitted.trainer.test(fitted.model, ORDERED, verbose=False) for fitted in (split, whole)
    )
    assert figures == pytest.approx(other, abs=1e-6)


class _Measured(Net):
    """Logs torchmetrics objects in every way that projects do, and extremes of batches."""

    def __init__(self, fuse):
        super().__init__(fuse)
        for stage in ("train", "val"):
            self.add_module(f"{stage}_loss", torchmetrics.MeanMetric())
            self.add_module(f"{stage}_worst", torchmetrics.MaxMetric())
            self.add_module(f"{stage}_samples", torchmetrics.SumMetric())
            self.add_module(f"{stage}_right", torchmetrics.Accuracy("binary"))
            self.add_module(f"{stage}_f1", torchmetrics.F1Score("binary"))
            both = {"mse": torchmetrics.MeanSquaredError(), "mae": torchmetrics.MeanAbsoluteError()}
            self.add_module(
                f"{stage}_both", torchmetrics.MetricCollection(both, prefix=f"{stage}_")
            )
            self.add_module(f"{stage}_auroc", torchmetrics.AUROC("binary"))
        self.steps: list[dict[str, float]] = []

    def _measure(self, stage, batch):
        x, y = batch
        predicted = self.layers(x)
        loss = functional.mse_loss(predicted, y)
        losses = functional.mse_loss(predicted, y, reduction="none").mean(1)
        for name, given in (
            ("loss", (loss, len(x))),
            ("worst", (losses,)),
            ("samples", (float(len(x)),)),
            ("right", (predicted.flatten(), (y > 0.5).int().flatten())),
            ("f1", (predicted.flatten(), (y > 0.5).int().flatten())),
        ):
            metric = getattr(self, f"{stage}_{name}")
            metric(*given)
            self.log(f"{stage}_{name}", metric, on_step=True, on_epoch=True)
        getattr(self, f"{stage}_auroc").update(predicted[:, 0].sigmoid(), (y[:, 0] > 0.5).int())
        self.log(f"{stage}_auroc", getattr(self, f"{stage}_auroc"), on_epoch=True, on_step=False)
        both = getattr(self, f"{stage}_both")
        both(predicted, y) if stage == "train" else both.update(predicted, y)
        self.log_dict(both, on_step=False, on_epoch=True)
        size = float(len(x))
        for reduce_fx in ("min", "max", "sum"):
            self.log(f"{stage}_{reduce_fx}_size", size, reduce_fx=reduce_fx, on_epoch=True)
            self.log(f"{stage}_{reduce_fx}_loss", loss, reduce_fx=reduce_fx, on_epoch=True)
        self.log(f"{stage}_far", predicted.max(), reduce_fx="max", on_step=True, on_epoch=True)
        worst = functional.mse_loss(predicted, y, reduction="none").mean(1).max()
        self.log(f"{stage}_hardest", worst, reduce_fx="max", on_step=True, on_epoch=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self._measure("train", batch)

    def validation_step(self, batch, batch_idx):
        return self._measure("val", batch)

    test_step = validation_step

    def on_train_batch_end(self, outputs, batch, batch_idx):
        metrics = dict(self.trainer.callback_metrics)
        metrics.pop("train_f1"), metrics.pop("train_f1_step")
        self.steps.append({name: float(value) for name, value in metrics.items()})


def test_metrics_are_those_of_whole_batches(tmp_path, caplog):
    """Some are metric objects, others extremes."""
    whole = Fitted(tmp_path, _Measured(Fuse()), epochs=2)
    assert whole.result["train_samples_epoch"] == 23
    assert whole.result["train_max_size"] == 4
    for fuse in (
        Fuse("forward", 3, fits=2),
        Fuse("backward", 4, fits=1),
        Fuse("forward", 6, fits=1),
        Fuse("forward", 1, fits=3, training=False),
        Fuse("forward", 2, fits=1, training=False),
    ):
        split = Fitted(tmp_path, _Measured(fuse), epochs=2)
        assert split.changed(training=fuse.is_for_training), fuse.at
        differ_by_rounding_alone(split.weights, whole.weights)
        for figures, other in zip(split.model.steps, whole.model.steps, strict=True):
            assert figures == pytest.approx(other, abs=1e-5), (fuse.where, fuse.at)
        split.result["train_f1_step"] = whole.result["train_f1_step"]
        assert split.result == pytest.approx(whole.result, abs=1e-5), (fuse.where, fuse.at)
    lines = {r.getMessage() for r in caplog.records if "reduce_fx" in r.getMessage()}
    assert len(lines) == 4, "of two maxima over samples in training and validation"
    assert all("_far'" in line or "_hardest'" in line for line in lines)
    assert all("not for a mean" in line for line in lines)
    # the mean of an accuracy's parts is the batch's, that of F1 scores is not
    steps = {r.getMessage() for r in caplog.records if "on_step=True" in r.getMessage()}
    names = {line.partition(",")[0] for line in steps}
    assert names == {"self.log('train_f1'", "self.log('val_f1'"}


def test_metrics_outside_modules_count_samples_once():
    """In a dictionary and in a closure, without Lightning: only its own metrics are submodules."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), Fuse("forward", fits=8))
    model.metrics = {"samples": torchmetrics.SumMetric()}
    mean = torchmetrics.MeanMetric()
    both = torchmetrics.MetricCollection([torchmetrics.SumMetric(), torchmetrics.MaxMetric()])

    def loss_of(x):
        model.metrics["samples"](len(x))
        mean.update(x)
        both.update(float(len(x)))
        return model(x).mean()

    MicroBatcher().backward(loss_of, torch.ones(32, 1), model)
    assert model.metrics["samples"].compute() == 32
    assert (float(mean.weight), float(mean.compute())) == (32, 1)
    figures = {name: float(value) for name, value in both.compute().items()}
    assert figures == {"SumMetric": 32, "MaxMetric": 8}


class _TooMuchToKeep(torchmetrics.MeanSquaredError):
    """Gets more of a batch than is kept until its last part."""

    def update(self, predicted, wanted, _large):
        super().update(predicted, wanted)


class _LargelyMeasured(Net):
    def __init__(self, fuse):
        super().__init__(fuse)
        self.metric = _TooMuchToKeep()

    def training_step(self, batch, batch_idx):
        x, y = batch
        predicted = self.layers(x)
        self.metric(predicted, y, torch.empty(17 << 20, dtype=torch.uint8).expand(len(x), -1))
        self.log("mse", self.metric, on_step=True, on_epoch=True)
        return functional.mse_loss(predicted, y)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.outputs.append(float(self.trainer.callback_metrics["mse_step"]))


def test_metrics_given_extra_tensors_count_samples_once(tmp_path):
    """They get more tensors than they keep."""
    whole, split = (
        Fitted(tmp_path, _LargelyMeasured(fuse)) for fuse in (Fuse(), Fuse("forward", 3, fits=2))
    )
    assert split.changed(training=True)
    assert split.model.outputs == pytest.approx(whole.model.outputs, abs=1e-6)
    assert split.result["mse_epoch"] == pytest.approx(whole.result["mse_epoch"], abs=1e-6)


class _Manual(Net):
    automatic_optimization = False
    accumulate_grad_batches = 1

    def training_step(self, batch, batch_idx):
        self.manual_backward(self._loss(batch).mean() / self.accumulate_grad_batches)
        if (batch_idx + 1) % self.accumulate_grad_batches == 0 or self.trainer.is_last_batch:
            self.optimizers().step()
            self.optimizers().zero_grad()

    on_train_batch_end = None


def test_evaluation_is_repeated_under_manual_optimization_too(tmp_path):
    whole, split = (
        Fitted(tmp_path, _Manual(fuse))
        for fuse in (Fuse(training=False), Fuse("forward", 3, fits=2, training=False))
    )
    assert not split.changed(training=True)
    assert [(before, after) for _, before, after in split.changed(training=False)] == [(3, 2)]
    assert split.result == pytest.approx(whole.result, abs=1e-6)
    assert split.model.accumulate_grad_batches == 2, "of this attempt"
    assert split.run.last_step == 3


class _StepsInEachBatch(Net):
    automatic_optimization = False
    on_train_batch_end = None

    def training_step(self, batch, batch_idx):
        self.manual_backward(self._loss(batch).mean())
        self.optimizers().step()
        self.optimizers().zero_grad()


def test_unaccumulated_manual_optimization_keeps_its_batch(tmp_path, caplog):
    model = _StepsInEachBatch(Fuse("forward", 3))
    with pytest.raises((RuntimeError, MemoryError), match=RUN_OUT):
        Fitted(tmp_path, model, batch_size=8)
    assert "Lightning: if memory runs out, a new attempt has the same batch" in caplog.text


class _KeepsGradients(Net):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)


class _ReturnsOne(Net):
    def training_step(self, batch, batch_idx):
        losses = self._loss(batch)
        return {"loss": losses.mean(), "losses": losses[:1]}

    on_train_batch_end = None


class _TwoPasses(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class _Scaled(Net):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [*batch, 0.5]

    def _loss(self, batch):
        return super()._loss(batch[:2])

    on_train_batch_end = None


def _is_run_by(strategy, monkeypatch):
    """Trainers look like that strategy's: neither runs without a GPU."""
    kind = getattr(lightning.pytorch.strategies, strategy)
    inner = lightning_step.find_obstacle

    def find_obstacle(trainer, model):
        return inner(SimpleNamespace(strategy=kind.__new__(kind)), model)

    monkeypatch.setattr(lightning_step, "find_obstacle", find_obstacle)


def _captures_graphs(kind, monkeypatch):
    segments = [{"segment_pool_id": (0, 1)}]
    monkeypatch.setattr(part_runner.cuda, "started_torch", lambda: torch)
    monkeypatch.setattr(part_runner.cuda, "memory_segments", lambda torch: segments)


@pytest.mark.proves("Lightning", "one GPU", "new attempt")
@pytest.mark.proves("Lightning", "one GPU", "refused", "`optimizer_zero_grad` of your own")
@pytest.mark.proves("Lightning", "one GPU", "refused", "LBFGS")
@pytest.mark.proves("Lightning", "one GPU", "refused", "results that cannot be joined")
@pytest.mark.proves("Lightning", "one GPU", "refused", "batches with numbers")
@pytest.mark.proves("Lightning", "several GPUs", "refused", "DeepSpeed")
@pytest.mark.proves("Lightning", "FSDP2", "refused", "every model")
@pytest.mark.proves("Lightning", "one GPU", "refused", "captured CUDA graphs")
@pytest.mark.proves("Lightning", "one GPU", "refused", "manual optimization")
@pytest.mark.parametrize(
    ("model", "disguise", "said"),
    [
        (_KeepsGradients, None, "optimizer_zero_grad decides"),
        (_TwoPasses, None, "LBFGS"),
        (_ReturnsOne, None, "results of parts cannot be put together"),
        (_Scaled, None, "batch[2] has 0"),
        (Net, (_is_run_by, "DeepSpeedStrategy"), "DeepSpeedStrategy"),
        (Net, (_is_run_by, "FSDPStrategy"), "FSDPStrategy runs"),
        (Net, (_captures_graphs, ""), "a CUDA graph was captured"),
        (_Manual, None, "(automatic_optimization=False)"),
    ],
    ids=["zero_grad", "LBFGS", "results", "numbers", "DeepSpeed", "FSDP", "graphs", "manual"],
)
def test_unsplittable_steps_are_reported_once(tmp_path, model, disguise, said, caplog, monkeypatch):
    """The next attempt has half the batch."""
    if disguise is not None:
        change, argument = disguise
        change(argument, monkeypatch)
    line = ends_the_attempt(
        lambda size: Fitted(tmp_path, model(Fuse("forward", 3)), batch_size=size), caplog
    )
    assert said in line
