"""A layer in whose forward or backward pass memory runs out, at a pass that a test chooses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class _Fuse(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, blows: bool) -> torch.Tensor:
        context.blows = blows
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if context.blows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return gradient, None


class Fuse(nn.Module):
    """From pass ``at`` on (counted from 1, in training or not), more than ``fits`` samples do not.

    Attributes:
        sizes: samples in each pass, failed ones included.
    """

    def __init__(self, where: str = "never", at: int = 1, fits: int = 2, *, training: bool = True):
        super().__init__()
        self.where, self.at, self.fits, self.is_for_training = where, at, fits, training
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training is not self.is_for_training:
            return x
        self.sizes.append(len(x))
        blows = len(self.sizes) >= self.at and len(x) > self.fits
        if blows and self.where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return _Fuse.apply(x, blows and self.where == "backward")
