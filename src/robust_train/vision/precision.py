"""Mixed precision: which number format the forward pass uses, and the loss scaling fp16 needs."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

log = logging.getLogger("robust_train.vision")


class Precision:
    """The number format of a run.

    bfloat16 where the GPU computes in it, else float16 with loss scaling (Micikevicius et al.
    2017, arXiv:1710.03740). On the CPU float32: few CPUs compute in bfloat16, the others emulate it
    slower.

    Args:
        device: that the model is on.
        mixed: ``training.mixed_precision``.
        dtype: number format of the forward pass; None for what the device is best at.
    """

    def __init__(
        self, device: torch.device, *, mixed: bool, dtype: torch.dtype | None = None
    ) -> None:
        self._device_type = device.type
        self.dtype = _best_of(device, mixed) if dtype is None else dtype
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype is torch.float16)

    def autocast(self) -> AbstractContextManager[Any]:
        """Around each forward pass."""
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self.dtype)


def _best_of(device: torch.device, mixed: bool) -> torch.dtype:
    if mixed and device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has_bf16 else torch.float16
    if mixed:
        log.info("training.mixed_precision has no effect on the CPU: float32 is used")
    return torch.float32
