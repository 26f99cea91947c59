"""One optimizer step from any number of micro-batches."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from robust_train.training.batches import Batch
from robust_train.training.precision import Precision


def accumulate_gradients(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    samples: int,
    precision: Precision,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Add the gradient of the mean loss over ``samples`` to the parameters' ``.grad``.

    Each micro-batch counts by its share of the samples: the sum of its losses is divided by the
    samples of the whole step. The mean of micro-batch means would overweight a short last one.

    Args:
        model: in training mode.
        batches: micro-batches with ``samples`` samples in all.
        samples: of the whole step.
        precision: number format and loss scale.
        label_smoothing: from 0 to 1.

    Returns:
        The mean loss over the samples, on the model's device, detached.
    """
    total: Tensor | None = None
    for images_BCHW, labels_B in batches:
        with precision.autocast():
            logits_BK = model(images_BCHW)
        if logits_BK.dtype in (torch.float16, torch.bfloat16):
            logits_BK = logits_BK.float()
        loss = nn.functional.cross_entropy(
            logits_BK, labels_B, reduction="sum", label_smoothing=label_smoothing
        )
        share = loss / samples
        torch.autograd.backward(precision.scaler.scale(share))
        total = share.detach() if total is None else total + share.detach()
    assert total is not None
    return total


def apply_gradients(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    precision: Precision,
    max_grad_norm: float,
) -> bool:
    """Clip (0: do not), step, and let go of the gradients.

    Returns:
        False where fp16 gradients overflowed: the parameters are unchanged, it was no step.
    """
    scaler = precision.scaler
    if max_grad_norm > 0:
        scaler.unscale_(optimizer)
        trained = [p for p in model.parameters() if p.requires_grad]
        nn.utils.clip_grad_norm_(trained, max_grad_norm)
    scale_before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    # none: gradients left over would count against the memory of validation
    optimizer.zero_grad(set_to_none=True)
    return not scaler.is_enabled() or scaler.get_scale() >= scale_before
