"""A small network on scikit-learn's digits with accelerate, under the launcher::

python train_robust.py trainer._target_=examples.accelerate_digits.train.train training.epochs=3
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from robust_train.integrations.accelerate import RobustLoop, effective_batch_size


def digits():
    """1,797 scanned digits of 8 x 8 pixels; every fifth is for validation."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target)
    is_validation = torch.arange(len(labels)) % 5 == 0
    return (
        TensorDataset(images[~is_validation], labels[~is_validation]),
        TensorDataset(images[is_validation], labels[is_validation]),
    )


def network(width, dropout):
    """Two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(4 * width, 10),
    )


def accuracy(accelerator, model, loader, run):
    """Share of the samples that are recognised, by all processes together."""
    model = accelerator.unwrap_model(model).eval()

    def hits(batch):
        images, labels = batch
        return (model(images).argmax(1) == labels).sum().item()

    right = total = 0
    with torch.no_grad():
        for batch in loader:
            right, total = (right + sum(run.forward(hits, batch, model)), total + len(batch[1]))
    counts = torch.tensor([right, total], device=accelerator.device)
    right, total = accelerator.reduce(counts).tolist()
    return right / total


def train(cfg, run):
    """The launcher calls this for each attempt."""
    set_seed(cfg.seed)
    accelerator = Accelerator(
        cpu=cfg.device == "cpu", mixed_precision="bf16" if cfg.training.mixed_precision else "no"
    )
    training, validation = digits()
    model = network(cfg.model.width, cfg.model.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.training.lr)
    model, optimizer, training, validation = accelerator.prepare(
        model,
        optimizer,
        DataLoader(
            training, effective_batch_size(cfg), shuffle=True, num_workers=cfg.training.num_workers
        ),
        DataLoader(validation, cfg.training.batch_size),
    )
    loop = RobustLoop(accelerator, model, training, cfg=cfg, run=run)

    def loss_of(batch):
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    for _ in loop.epochs(cfg.training.epochs):
        model.train()
        for batch in loop.batches():
            loop.backward(loss_of, batch)
            accelerator.clip_grad_norm_(model.parameters(), cfg.training.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    loop.save()
    return accuracy(accelerator, model, validation, run)
