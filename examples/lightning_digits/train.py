"""A small network on scikit-learn's digits with Lightning, under the launcher::

python train_robust.py trainer._target_=examples.lightning_digits.train.train training.epochs=3
"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from robust_train.integrations.lightning import fit, trainer_arguments


class Digits(lightning.LightningDataModule):
    """1,797 scanned digits of 8 x 8 pixels; every fifth is for validation."""

    def __init__(self, cfg):
        super().__init__()
        self.batch_size = cfg.training.batch_size
        self.num_workers = cfg.training.num_workers

    def setup(self, stage):
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
        labels = torch.tensor(digits.target)
        is_validation = torch.arange(len(labels)) % 5 == 0
        self.training = TensorDataset(images[~is_validation], labels[~is_validation])
        self.validation = TensorDataset(images[is_validation], labels[is_validation])

    def train_dataloader(self):
        return DataLoader(
            self.training, self.batch_size, shuffle=True, num_workers=self.num_workers
        )

    def val_dataloader(self):
        return DataLoader(self.validation, self.batch_size)


class Net(lightning.LightningModule):
    """Two convolutions and a linear layer."""

    def __init__(self, cfg):
        super().__init__()
        self.lr = cfg.training.lr
        self.epochs = cfg.training.epochs
        width = cfg.model.width
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * width, 10),
        )

    def training_step(self, batch):
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch):
        images, labels = batch
        accuracy = (self.layers(images).argmax(1) == labels).float().mean()
        # Lightning warns without sync_dist. All ranks validate in full, so the mean is the same.
        self.log("val_accuracy", accuracy, batch_size=len(labels), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(cfg, run):
    """The launcher calls this for each attempt."""
    lightning.seed_everything(cfg.seed, verbose=False)
    trainer = lightning.Trainer(
        **trainer_arguments(cfg, run), max_epochs=cfg.training.epochs, logger=False
    )
    return fit(trainer, Net(cfg), Digits(cfg), cfg=cfg, run=run, metric="val_accuracy")
