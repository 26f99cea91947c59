"""The optimizer and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn


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
