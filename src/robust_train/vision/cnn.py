"""The small network behind ``model=cnn``."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_LEAST_MAP_SIZE = 4
_MOST_STAGES = 5
_WIDEST_FACTOR = 8


class SmallCnn(nn.Module):
    """Stages of two 3×3 convolutions, ``width`` channels in the first.

    Each later stage halves the map and doubles the channels, until the map is about 4×4. GroupNorm
    instead of BatchNorm: any split of the effective batch trains the same.

    Shape suffixes: B samples, C channels, H rows, W columns, K classes.
    """

    def __init__(
        self, *, channels: int, image_size: int, num_classes: int, width: int, dropout: float
    ) -> None:
        super().__init__()
        halvings = max(1, math.floor(math.log2(max(image_size, 1) / _LEAST_MAP_SIZE)))
        stages: list[nn.Module] = []
        before = channels
        for index in range(min(halvings + 1, _MOST_STAGES)):
            after = width * min(2**index, _WIDEST_FACTOR)
            stages.append(_stage(before, after, halve=index > 0))
            before = after
        self.stages = nn.ModuleList(stages)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(before * 4, num_classes)
        self.is_checkpointing = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each stage in the backward pass instead of keeping its activations."""
        self.is_checkpointing = enable

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return logits B×K."""
        x_BCHW = images_BCHW
        for stage in self.stages:
            if self.is_checkpointing and self.training and torch.is_grad_enabled():
                x_BCHW = checkpoint(stage, x_BCHW, use_reentrant=False)
            else:
                x_BCHW = stage(x_BCHW)
        logits_BK: Tensor = self.head(self.dropout(self.pool(x_BCHW).flatten(1)))
        return logits_BK


def _stage(before: int, after: int, *, halve: bool) -> nn.Sequential:
    layers: list[nn.Module] = [nn.MaxPool2d(2, ceil_mode=True)] if halve else []
    for channels in (before, after):
        layers += [
            nn.Conv2d(channels, after, kernel_size=3, padding=1, bias=False),
            nn.GroupNorm(math.gcd(8, after), after),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)
