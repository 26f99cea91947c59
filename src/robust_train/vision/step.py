"""One optimizer step from any number of micro-batches, its number format; the score of a split."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from robust_train.failures import classify_failure
from robust_train.step import ranks
from robust_train.step.batcher import MicroBatcher
from robust_train.vision.batches import Batch

log = logging.getLogger("robust_train.vision")


class Precision:
    """The number format of a run; ``dtype`` overrides the choice. bfloat16 if the GPU computes in
    it, else float16 with loss scaling (Micikevicius et al. 2017, arXiv:1710.03740). On the CPU
    float32: most CPUs emulate bfloat16, slower."""

    def __init__(
        self, device: torch.device, *, mixed: bool, dtype: torch.dtype | None = None
    ) -> None:
        self._device_type = device.type
        self.dtype = _best_of(device, mixed) if dtype is None else dtype
        self.scaler = torch.amp.GradScaler(
            device.type, enabled=self.dtype is torch.float16
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for each forward pass."""
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self.dtype)


def _best_of(device: torch.device, mixed: bool) -> torch.dtype:
    if mixed and device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has_bf16 else torch.float16
    if mixed:
        log.debug("training.mixed_precision has no effect on the CPU: float32 is used")
    return torch.float32


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return images and labels on ``device``; copies from pinned memory do not block."""
    images_BCHW, labels_B = (
        part.to(device, non_blocking=device.type == "cuda") for part in batch
    )
    return images_BCHW, labels_B


def loss_of(
    model: nn.Module,
    batch: Batch,
    *,
    device: torch.device,
    precision: Precision,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the mean loss over some of a step's samples."""
    images_BCHW, labels_B = to_device(batch, device)
    with precision.autocast():
        logits_BK = model(images_BCHW)
    if logits_BK.dtype in (torch.float16, torch.bfloat16):
        logits_BK = logits_BK.float()
    return nn.functional.cross_entropy(
        logits_BK, labels_B, label_smoothing=label_smoothing
    )


def apply_gradients(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    precision: Precision,
    max_grad_norm: float,
) -> bool:
    """Clip (0: do not), step, and release the gradients; return whether it was a step. It is none
    if fp16 gradients overflowed: the parameters are unchanged."""
    scaler = precision.scaler
    if max_grad_norm > 0:
        scaler.unscale_(optimizer)
        trained = [p for p in model.parameters() if p.requires_grad]
        nn.utils.clip_grad_norm_(trained, max_grad_norm)
    scale_before = scaler.get_scale()
    _step_or_undo(optimizer, scaler)
    scaler.update()
    # kept gradients would count against the memory of validation
    optimizer.zero_grad(set_to_none=True)
    return not scaler.is_enabled() or scaler.get_scale() >= scale_before


def _step_or_undo(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> None:
    """Take a step. If memory runs out, remove the optimizer's state that this step has created. An
    optimizer creates its state in the first step, and would later take half of it for all."""
    known = set(optimizer.state)
    try:
        scaler.step(optimizer)
    except Exception as error:
        if classify_failure(error).kind.is_memory:
            for parameter in set(optimizer.state) - known:
                del optimizer.state[parameter]
            optimizer.zero_grad(set_to_none=True)
        raise


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
    # called after each batch, and at least `rounds` times
    should_stop: Callable[[], bool] = lambda: False,
    rounds: int = 0,  # batches of the rank that has most
    own: int
    | None = None,  # batches that count; further ones are for the other ranks; None: all
) -> Score | None:
    """Score ``model`` and leave it in evaluation mode; None if ``should_stop`` returned true.

    Each of several ranks scores its share, and all get the score of the whole; ``model`` is without
    a wrapper, or the ranks would wait for each other in it; one that is sharded has equally many
    batches on each. If memory runs out, the part that failed is scored again in smaller parts.
    """
    model.eval()

    def score(part: Batch) -> Tensor:
        images_BCHW, labels_B = to_device(part, device)
        with precision.autocast():
            logits_BK = model(images_BCHW).float()
        loss = nn.functional.cross_entropy(logits_BK, labels_B, reduction="sum")
        hits = (logits_BK.argmax(dim=1) == labels_B).sum()
        return torch.stack(
            [loss.double(), hits.double(), loss.new_tensor(len(labels_B)).double()]
        )

    # loss, hits, samples
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for number, batch in enumerate(batches):
        scores = batcher.forward(score, batch, model)
        if own is None or number < own:
            sums += torch.stack(scores).sum(dim=0)
        rounds -= 1
        if should_stop():
            return None
    if any(should_stop() for _ in range(rounds)):
        return None
    if ranks.here() is not None:
        dist.all_reduce(sums)
    loss_sum, correct, samples = sums.tolist()
    return Score(correct / samples, loss_sum / samples)


def make_optimizer(
    parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float
) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101) for the trained parameters. Vectors
    (biases, norms' scales) do not decay."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr)


@dataclass(frozen=True)
class CosineSchedule:
    """Linear warm-up, then half a cosine to zero (Loshchilov & Hutter 2016, arXiv:1608.03983). A
    function of the samples seen, without state: a resume continues it, also with another number of
    samples in a step. ``warmup_fraction`` is of the ``total_samples`` of all epochs."""

    peak: float
    total_samples: int
    warmup_fraction: float

    def rate(self, samples_seen: int, step_samples: int) -> float:
        """Return the learning rate of a step of ``step_samples`` after ``samples_seen``."""
        warmup = self.warmup_fraction * self.total_samples
        # the end of the step counts while rising, so that the first step moves at all
        if samples_seen + step_samples <= warmup:
            return self.peak * (samples_seen + step_samples) / warmup
        rest = max(self.total_samples - warmup, 1)
        progress = min(max(samples_seen - warmup, 0) / rest, 1.0)
        return self.peak * 0.5 * (1 + math.cos(math.pi * progress))
