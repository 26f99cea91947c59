"""Parts of the built-in trainer's step: number format, loss, optimizer, schedule and counters.

`vision.trainer` combines them in the attempt's process.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from robust_train.vision.images import Batch

log = logging.getLogger("robust_train.vision")


class Precision:
    """The number format of a run.

    Mixed precision uses bfloat16 on a GPU, or float16 with loss scaling (Micikevicius et al. 2017,
    arXiv:1710.03740) if the GPU does not support bfloat16. The CPU always uses float32, because
    most CPUs only emulate bfloat16, which is slower.
    """

    def __init__(self, device: torch.device, *, mixed: bool) -> None:
        self.dtype = torch.float32
        if mixed and device.type == "cuda":
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            self.dtype = torch.bfloat16 if has_bf16 else torch.float16
        elif mixed:
            log.debug("training.mixed_precision has no effect on the CPU: float32 is used")
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype is torch.float16)

    def autocast(self) -> torch.autocast:
        """Return the context manager for a forward pass."""
        return torch.autocast("cuda", self.dtype, self.dtype is not torch.float32)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch's images and labels on ``device``. Copies from pinned memory do not block."""
    is_gpu = device.type == "cuda"
    images_BCHW, labels_B = batch
    images_BCHW = images_BCHW.to(device, non_blocking=is_gpu)
    labels_B = labels_B.to(device, non_blocking=is_gpu)
    return images_BCHW, labels_B


def loss_of(
    model: nn.Module,
    batch: Batch,
    *,
    device: torch.device,
    precision: Precision,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the mean loss over a batch, which may be a part of a step's samples."""
    images_BCHW, labels_B = to_device(batch, device)
    with precision.autocast():
        logits_BK = model(images_BCHW)
    if precision.dtype is not torch.float32:
        logits_BK = logits_BK.float()
    return cross_entropy(logits_BK, labels_B, label_smoothing=label_smoothing)


def make_optimizer(
    parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float, fused: bool = False
) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101) for the trained parameters.

    Vectors (biases and the scales of norms) have no weight decay. With ``fused``, one GPU kernel
    makes the update. It can skip a bad update itself, so the host need not wait for the loss.
    """
    trained = [p for p in parameters if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    groups: list[dict[str, Any]] = []
    if matrices:
        groups.append({"params": matrices, "weight_decay": weight_decay})
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=lr, fused=fused or None)


def with_kernels_of(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a saved optimizer state with the ``fused`` setting of this optimizer.

    The job may resume on another kind of device, which needs other kernels.
    """
    fused = optimizer.defaults.get("fused")
    groups = [{**group, "fused": fused} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


@dataclass(frozen=True)
class CosineSchedule:
    """Linear warm-up, then half a cosine to zero (Loshchilov & Hutter 2016, arXiv:1608.03983).

    The schedule has no state: the rate depends only on the number of samples seen. So a resumed run
    continues the schedule, even with a different number of samples in a step.

    Attributes:
        peak: the largest rate.
        total_samples: the samples of all epochs together.
        warmup_fraction: the share of ``total_samples`` during which the rate rises.
    """

    peak: float
    total_samples: int
    warmup_fraction: float

    def rate(self, samples_seen: int, step_samples: int) -> float:
        """Return the rate of a step of ``step_samples`` samples after ``samples_seen`` samples."""
        warmup = self.warmup_fraction * self.total_samples
        # During the warm-up, the end of the step counts. Otherwise the first rate would be 0.
        if samples_seen + step_samples <= warmup:
            return self.peak * (samples_seen + step_samples) / warmup
        rest = max(self.total_samples - warmup, 1)
        progress = min(max(samples_seen - warmup, 0) / rest, 1.0)
        return self.peak * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass
class EpochPosition:
    """The position of a run, in units that do not depend on the micro-batch size.

    Attributes:
        step: the number of optimizer steps done.
        epoch: the current epoch, counted from 0.
        samples: the samples of this epoch that are done. During validation, all of them are.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True)
class Score:
    """Accuracy (from 0 to 1) and mean cross-entropy (in nats) over a split."""

    accuracy: float
    loss: float


class LossAverage:
    """A mean loss over samples. The sum is kept on the device, so only reading it waits."""

    def __init__(self, total: float = 0.0, samples: int = 0) -> None:
        self._total: Tensor | float = total
        self._samples: Tensor | int = samples

    def add(self, mean_loss: Tensor, samples: int, *, finite: bool = False) -> None:
        """Add the mean loss of ``samples`` samples.

        With ``finite``, a loss that is not finite is left out, because its update was skipped.
        """
        if not finite:
            self._total = self._total + mean_loss * samples
            self._samples = self._samples + samples
            return
        counts = torch.isfinite(mean_loss)
        self._total = self._total + torch.where(counts, mean_loss * samples, 0.0)
        self._samples = self._samples + counts * samples

    def value(self) -> float:
        """Return the mean. It is 0 before the first loss, and NaN if no loss was finite."""
        total, samples = self.state()
        if isinstance(self._samples, Tensor) and not samples:
            return math.nan
        return total / max(samples, 1)

    def state(self) -> tuple[float, int]:
        """Return the sum and the number of samples, for a checkpoint."""
        return float(self._total), int(self._samples)
