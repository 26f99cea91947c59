"""One optimizer step from any number of micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_train.failures import classify_failure
from robust_train.microbatch.batcher import MicroBatches
from robust_train.values import MEMORY_FAILURES
from robust_train.vision.batches import Batch
from robust_train.vision.precision import Precision


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Images and labels on ``device``; from pinned memory the copy runs beside the computation."""
    images_BCHW, labels_B = batch
    is_cuda = device.type == "cuda"
    return (
        images_BCHW.to(device, non_blocking=is_cuda),
        labels_B.to(device, non_blocking=is_cuda),
    )


def accumulate_gradients(
    model: nn.Module,
    parts: MicroBatches,
    *,
    device: torch.device,
    precision: Precision,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Add the gradient of the mean loss over a step's samples to the parameters' ``.grad``.

    Each micro-batch counts by its share of the samples: the mean of micro-batch means would
    overweight a short one. Where memory runs out the step is repeated with finer parts.

    Args:
        model: in training mode, on ``device``.
        parts: the step's micro-batches of images and labels.
        device: where to compute.
        precision: number format and loss scale.
        label_smoothing: from 0 to 1.

    Returns:
        The mean loss over the samples, on the model's device, detached.
    """
    for micro in parts:
        with micro:
            images_BCHW, labels_B = to_device(micro.data, device)
            with precision.autocast():
                logits_BK = model(images_BCHW)
            if logits_BK.dtype in (torch.float16, torch.bfloat16):
                logits_BK = logits_BK.float()
            loss = nn.functional.cross_entropy(logits_BK, labels_B, label_smoothing=label_smoothing)
            micro.backward(loss, scaler=precision.scaler)
    return parts.loss


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
    _step_or_undo(optimizer, scaler)
    scaler.update()
    # none: gradients left over would count against the memory of validation
    optimizer.zero_grad(set_to_none=True)
    return not scaler.is_enabled() or scaler.get_scale() >= scale_before


def _step_or_undo(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    """Step. Where memory runs out, state that this step has only begun to make is removed.

    An optimizer makes the state of all parameters in its first step, and would take half of it for
    the whole at the next one.
    """
    had_state = list(optimizer.state)
    try:
        scaler.step(optimizer)
    except Exception as error:
        if classify_failure(error).kind in MEMORY_FAILURES:
            known = set(map(id, had_state))
            for parameter in list(optimizer.state):
                if id(parameter) not in known:
                    del optimizer.state[parameter]
            optimizer.zero_grad(set_to_none=True)
        raise
