"""One part of a batch: what is repeated where memory runs out in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from robust_train.microbatch import record as told
from robust_train.microbatch.rewind import sequence_number
from robust_train.values import Failure

if TYPE_CHECKING:
    from robust_train.microbatch.batcher import MicroBatches


class MicroBatch:
    """One part of a batch. Use it as ``with micro:`` around all that is to be repeated.

    Attributes:
        data: the samples, in the structure of the batch.
        start: of the first sample in the batch.
        stop: of the sample after the last one.
        done: the body went through; False after memory ran out in it.
        is_probe: it is only measured, and nothing of it is left afterwards.
        since: autograd's number when the body began.
    """

    def __init__(
        self,
        batches: MicroBatches,
        data: Any,
        weight: float,
        start: int,
        stop: int,
        *,
        is_probe: bool = False,
    ) -> None:
        self.data = data
        self.start = start
        self.stop = stop
        self.done = False
        self.is_probe = is_probe
        self._batches = batches
        self._weight = weight
        self._is_weighted = False
        self._loss: Tensor | None = None
        self._kept: list[Any] = []
        self._entered = False
        self.since: int | None = None
        self._failure: Failure | None = None
        self._size = stop - start

    def __len__(self) -> int:
        """Samples in this part."""
        return self.stop - self.start

    @property
    def weight(self) -> float:
        """Share of this part in the mean over the batch: multiply the mean loss by it."""
        self._is_weighted = True
        return self._weight

    def backward(self, loss: Tensor, *, scaler: torch.amp.GradScaler | None = None) -> None:
        """The backward pass of ``loss``, weighted so that the parts add up to the batch's mean.

        Args:
            loss: mean over this part's samples (or over what ``count`` counts), a scalar.
            scaler: the loss scaling of mixed precision.
        """
        weight = self.weight
        # a mean over nothing is no number, whatever it is multiplied by
        if not weight:
            return
        share = loss if weight == 1.0 else loss * weight
        torch.autograd.backward(share if scaler is None else scaler.scale(share))
        self._loss = share.detach()

    def keep(self, value: Any) -> None:
        """Put a result of this part into :attr:`MicroBatches.kept`, if the body goes through."""
        self._kept.append(value)

    def __enter__(self) -> MicroBatch:
        self._entered = True
        self.since = sequence_number()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, frames: Any) -> bool:
        batches = self._batches
        if error is None:
            self._check_weighted()
            self.done = True
            batches.kept += self._kept
            if self._loss is not None:
                before = batches._loss
                batches._loss = self._loss if before is None else before + self._loss
            return False
        if not isinstance(error, Exception):
            batches._leave()
            return False
        is_taken = batches._take(self, error)
        self.data, self._loss, self._kept = None, None, []
        return is_taken

    def _check_weighted(self) -> None:
        """The first part tells whether the loop weights its losses; a wrong one must not go on."""
        # a probe's gradients were made for it
        if self._is_weighted or self.start or self.is_probe:
            return
        start = self._batches._start
        if start is None or not start.has_gradients():
            return
        self._batches._leave()
        raise RuntimeError(told.NO_WEIGHT)

    def _must_have_been_used(self) -> None:
        if not self._entered:
            raise RuntimeError(told.NOT_ENTERED)
