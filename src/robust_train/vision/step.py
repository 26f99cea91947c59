"""The parts of a step: number format, loss, optimizer, schedule and counters."""

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
    """The number format of a run: bfloat16 if the GPU computes in it, else float16 with loss
    scaling (Micikevicius et al. 2017, arXiv:1710.03740). On the CPU float32: most CPUs emulate
    bfloat16, slower."""

    def __init__(self, device: torch.device, *, mixed: bool) -> None:
        self.dtype = torch.float32
        if mixed and device.type == "cuda":
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            self.dtype = torch.bfloat16 if has_bf16 else torch.float16
        elif mixed:
            log.debug("training.mixed_precision has no effect on the CPU: float32 is used")
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype is torch.float16)

    def autocast(self) -> torch.autocast:
        """Return the context for each forward pass."""
        return torch.autocast("cuda", self.dtype, self.dtype is not torch.float32)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return images and labels on ``device``. Copies from pinned memory do not block."""
    images_BCHW, labels_B = (part.to(device, non_blocking=device.type == "cuda") for part in batch)
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
    return cross_entropy(
        logits_BK if precision.dtype is torch.float32 else logits_BK.float(),
        labels_B,
        label_smoothing=label_smoothing,
    )


def make_optimizer(
    parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float, fused: bool = False
) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101) for the trained parameters. Vectors
    (biases, norms' scales) do not decay. ``fused`` runs a single kernel on a GPU, which skips a bad
    update itself, so that the host does not wait for it."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, fused=fused or None)


def with_own_kernels(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a saved optimizer state with the kernels of this optimizer, because a job may resume
    on another device."""
    fused = optimizer.defaults.get("fused")
    groups = [{**group, "fused": fused} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


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


@dataclass
class EpochPosition:
    """The position of a run, in terms that no split into micro-batches changes: optimizer steps
    done, the current epoch from 0, and its samples that are done (all during validation).
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True)
class Score:
    """Accuracy (0 to 1) and mean cross-entropy in nats over a split."""

    accuracy: float
    loss: float


class LossAverage:
    """A mean over samples, summed on the device: only reading it waits for the device."""

    def __init__(self, total: float = 0.0, samples: int = 0) -> None:
        self._total: Tensor | float = total
        self._samples: Tensor | int = samples

    def add(self, mean_loss: Tensor, samples: int, *, finite: bool = False) -> None:
        """Add the mean loss of ``samples`` samples. With ``finite``, leave out a loss that is not
        finite, whose update was skipped."""
        if not finite:
            self._total = self._total + mean_loss * samples
            self._samples = self._samples + samples
            return
        counts = torch.isfinite(mean_loss)
        self._total = self._total + torch.where(counts, mean_loss * samples, 0.0)
        self._samples = self._samples + counts * samples

    def value(self) -> float:
        """Return the mean: 0 before the first loss, NaN if none of them was finite."""
        total, samples = self.state()
        if isinstance(self._samples, Tensor) and not samples:
            return math.nan
        return total / max(samples, 1)

    def state(self) -> tuple[float, int]:
        """Return sum and number, for a checkpoint."""
        return float(self._total), int(self._samples)
