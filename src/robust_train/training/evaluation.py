"""How well a model does on a split."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from robust_train.training.batches import Batch
from robust_train.training.precision import Precision


@dataclass(frozen=True)
class Score:
    """Accuracy (0 to 1) and mean cross-entropy in nats over a split."""

    accuracy: float
    loss: float


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    precision: Precision,
    device: torch.device,
    should_stop: Callable[[], bool] = lambda: False,
) -> Score | None:
    """Score ``model``; it is left in evaluation mode.

    Memory: without autograd and with training's micro-batches it needs less than a training step;
    of each batch only two sums are kept.

    Returns:
        The score, None if ``should_stop`` said so between two batches.
    """
    model.eval()
    samples = 0
    correct = torch.zeros((), dtype=torch.long, device=device)
    loss_sum = torch.zeros((), dtype=torch.float32, device=device)
    for images_BCHW, labels_B in batches:
        with precision.autocast():
            logits_BK = model(images_BCHW).float()
        loss_sum += nn.functional.cross_entropy(logits_BK, labels_B, reduction="sum")
        correct += (logits_BK.argmax(dim=1) == labels_B).sum()
        samples += len(labels_B)
        if should_stop():
            return None
    return Score(correct.item() / samples, loss_sum.item() / samples)
