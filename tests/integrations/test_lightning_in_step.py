"""Lightning's Trainer repeats the step in which memory runs out, in smaller parts."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from running_out import Fuse
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from robust_train.integrations.in_step import InStep
from robust_train.run import MicroBatchPlan, Run

lightning = pytest.importorskip("lightning", reason="the extra [lightning] is not installed")


class Net(lightning.LightningModule):
    def __init__(self, fuse: Fuse) -> None:
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
        return {"loss": losses.mean(), "losses": losses.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert len(outputs["losses"]) == len(batch[0])
        logged = self.trainer.callback_metrics
        self.outputs.append((float(outputs["loss"]), float(logged["largest"])))

    def on_before_zero_grad(self, optimizer):
        self.hooks.append("zero_grad")

    def on_before_optimizer_step(self, optimizer):
        self.hooks.append("step")

    def validation_step(self, batch, batch_idx):
        losses = self._loss(batch)
        self.log("val", losses.mean(), on_step=True, on_epoch=True)
        return losses

    def predict_step(self, batch):
        return self.layers(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.05)


CFG = OmegaConf.create(
    {
        "device": "cpu",
        "min_batch_size": 1,
        "training": {
            "batch_size": 4,
            "gradient_accumulation_steps": 2,
            "seed": 3,
            "checkpoint_every_minutes": 60,
            "checkpoint_every_steps": None,
            "keep_checkpoints": 2,
            "log_every_steps": 1,
        },
    }
)


def loader(count: int = 22) -> DataLoader:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, 4, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :2] ** 2), 4, shuffle=True)


ORDERED = DataLoader(loader(7).dataset, 4)


class Fitted:
    """A trainer that was fitted: weights, what was logged, events."""

    def __init__(self, folder: Path, model: lightning.LightningModule) -> None:
        from robust_train.integrations.lightning import fit

        self.events: list[dict] = []
        self.run = Run(run_dir=folder, report=lambda event: self.events.append(event.as_json()))
        self.run.micro_batch_plan = MicroBatchPlan.of(CFG)
        self.trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            default_root_dir=str(folder),
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            max_epochs=1,
            num_sanity_val_steps=0,
            gradient_clip_val=0.5,
        )
        self.result = fit(
            self.trainer, model, loader(), cfg=CFG, run=self.run, val_dataloaders=loader(7)
        )
        self.model = model
        self.weights = torch.cat([p.detach().flatten() for p in model.parameters()])

    def changed(self, *, training: bool) -> list[tuple]:
        return [
            (e["step"], e["before"], e["after"])
            for e in self.events
            if e["event"] == "micro_batch_changed" and e["training"] is training
        ]


def test_wherever_memory_runs_out_weights_hooks_and_logs_are_those_of_a_run_with_enough(
    tmp_path: Path,
):
    whole = Fitted(tmp_path, Net(Fuse()))
    assert whole.model.hooks == ["zero_grad", "step"] * 3
    # the third batch is the first of step 2; the last one has two samples
    for where, at in itertools.product(("forward", "backward"), (3, 4, 5)):
        fuse = Fuse(where, at, fits=2)
        split = Fitted(tmp_path, Net(fuse))
        assert split.changed(training=True) == [((at + 1) // 2, 4, 2)], (where, at)
        again = at - 1 if at == 4 else at  # the step's batches so far
        assert fuse.sizes[at:] == [2] * (2 * (6 - again) + 1), (where, at)
        torch.testing.assert_close(split.weights, whole.weights, rtol=0, atol=1e-5)
        assert split.model.hooks == whole.model.hooks
        for one, other in zip(split.model.outputs, whole.model.outputs, strict=True):
            assert one == pytest.approx(other, abs=1e-6)
        assert split.result == pytest.approx(whole.result, abs=1e-6)
        assert split.trainer.global_step == whole.trainer.global_step


def test_batches_of_a_short_step_keep_their_weights_when_the_last_one_runs_out(tmp_path: Path):
    whole = Fitted(tmp_path, Net(Fuse()))
    split = Fitted(tmp_path, Net(Fuse("forward", 6, fits=1)))
    assert split.changed(training=True) == [(3, 2, 1)]
    torch.testing.assert_close(split.weights, whole.weights, rtol=0, atol=1e-5)


def test_a_batch_that_cannot_be_cut_leaves_the_others_their_parts(tmp_path: Path):
    in_step = InStep(Run(run_dir=tmp_path), "Lightning")
    assert in_step.samples_of({"x": torch.zeros(4, 2), "scale": 0.5}) is None
    assert in_step.samples_of({"x": torch.zeros(4, 2)}) == 4


def test_an_evaluation_repeats_the_batch_in_which_memory_runs_out(tmp_path: Path):
    whole = Fitted(tmp_path, Net(Fuse()))
    fuse = Fuse("forward", 1, fits=2, training=False)
    split = Fitted(tmp_path, Net(fuse))
    assert fuse.sizes[:5] == [4, 2, 2, 1, 2], "the second batch has three"
    assert not split.changed(training=True)
    ((_, before, after),) = split.changed(training=False)
    assert (before, after) == (4, 2)
    assert split.result == pytest.approx(whole.result, abs=1e-6)
    one, other = (fitted.trainer.predict(fitted.model, ORDERED) for fitted in (split, whole))
    torch.testing.assert_close(one, other)


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


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (_KeepsGradients, "optimizer_zero_grad decides"),
        (_TwoPasses, "LBFGS"),
        (_ReturnsOne, "results of parts cannot be put together"),
    ],
)
def test_what_cannot_be_split_is_said_once_and_ends_the_attempt(
    tmp_path: Path, model: type, said: str, caplog: pytest.LogCaptureFixture
):
    with pytest.raises(torch.OutOfMemoryError):
        Fitted(tmp_path, model(Fuse("forward", 3)))
    lines = [r.getMessage() for r in caplog.records if "no step is repeated" in r.getMessage()]
    assert len(lines) == 1
    assert said in lines[0]
