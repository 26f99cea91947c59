"""Score a model on a split."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from robust_train.microbatch import ranks
from robust_train.microbatch.batcher import MicroBatcher
from robust_train.vision.batches import Batch
from robust_train.vision.step import Precision, to_device


@dataclass(frozen=True)
class Score:
    """Accuracy (0 to 1) and mean cross-entropy in nats over a split."""

    accuracy: float
    loss: float


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    batcher: MicroBatcher,
    *,
    precision: Precision,
    device: torch.device,
    should_stop: Callable[[], bool] = lambda: False,
    rounds: int = 0,
) -> Score | None:
    """Score ``model`` and leave it in evaluation mode.

    Each of several ranks scores its share, and all get the score of the whole. Needs less memory
    than a training step; if memory runs out nevertheless, the part that failed is scored again in
    smaller parts.

    Args:
        model: without a wrapper, or the ranks would wait for each other in it.
        should_stop: called after each batch, and at least ``rounds`` times.
        rounds: batches of the rank that has most.

    Returns:
        The score, None if ``should_stop`` returned true.
    """
    model.eval()
    samples = 0
    correct = torch.zeros((), dtype=torch.long, device=device)
    loss_sum = torch.zeros((), dtype=torch.float32, device=device)
    for batch in batches:
        parts = batcher.micro_batches(batch, training=False)
        for micro in parts:
            with micro:
                images_BCHW, labels_B = to_device(micro.data, device)
                with precision.autocast():
                    logits_BK = model(images_BCHW).float()
                loss = nn.functional.cross_entropy(logits_BK, labels_B, reduction="sum")
                micro.keep((loss, (logits_BK.argmax(dim=1) == labels_B).sum()))
        for loss, hits in parts.kept:
            loss_sum += loss
            correct += hits
        samples += parts.samples
        rounds -= 1
        if should_stop():
            return None
    if any(should_stop() for _ in range(rounds)):
        return None
    sums = torch.stack(
        [loss_sum.double(), correct.double(), torch.full_like(loss_sum, samples).double()]
    )
    if ranks.here() is not None:
        dist.all_reduce(sums)
    total_loss, total_correct, total = sums.tolist()
    return Score(total_correct / total, total_loss / total)
