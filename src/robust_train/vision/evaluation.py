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
    """Score ``model`` and leave it in evaluation mode; None if ``should_stop`` returned true.

    Each of several ranks scores its share, and all get the score of the whole; ``model`` is without
    a wrapper, or the ranks would wait for each other in it. If memory runs out, the part that
    failed is scored again in smaller parts.

    Args:
        should_stop: called after each batch, and at least ``rounds`` times.
        rounds: batches of the rank that has most.
    """
    model.eval()
    # loss, hits, samples
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in batches:
        parts = batcher.micro_batches(batch, training=False)
        for micro in parts:
            with micro:
                images_BCHW, labels_B = to_device(micro.data, device)
                with precision.autocast():
                    logits_BK = model(images_BCHW).float()
                loss = nn.functional.cross_entropy(logits_BK, labels_B, reduction="sum")
                hits = (logits_BK.argmax(dim=1) == labels_B).sum()
                micro.keep(torch.stack([loss.double(), hits.double()]))
        for kept in parts.kept:
            sums[:2] += kept
        sums[2] += parts.samples
        rounds -= 1
        if should_stop():
            return None
    if any(should_stop() for _ in range(rounds)):
        return None
    if ranks.here() is not None:
        dist.all_reduce(sums)
    loss_sum, correct, samples = sums.tolist()
    return Score(correct / samples, loss_sum / samples)
