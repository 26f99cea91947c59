"""One part of a batch: what is repeated where memory runs out in it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from robust_train.compat import autograd_sequence_number
from robust_train.values import Failure

NOT_ENTERED = (
    "a micro-batch was not used as a context manager; write `with micro:` around the loop's body, "
    "so that running out of memory can be repaired"
)


class Step(Protocol):
    """What a part calls of :class:`robust_train.microbatch.batcher.MicroBatches`."""

    def part_done(self, loss: Tensor | None, kept: list[Any]) -> None: ...
    def part_failed(self, micro: MicroBatch, error: Exception) -> bool: ...
    def must_have_no_gradients(self) -> None: ...
    def leave(self) -> None: ...


class MicroBatch:
    """One part of a batch. Use it as ``with micro:`` around all that is to be repeated.

    Attributes:
        data: the samples, in the structure of the batch.
        start: of the first sample in the batch.
        stop: of the sample after the last one.
        done: the body went through; False after memory ran out in it.
        is_probe: it is only measured, and nothing of it is left afterwards.
        since: autograd's number when the body began.
        failure: why memory ran out in it, None where it did not.
        size: most samples in a part when it did.
    """

    def __init__(
        self,
        step: Step,
        data: Any,
        weight: float,
        start: int,
        stop: int,
        *,
        is_probe: bool = False,
        is_sharded: bool = False,
    ) -> None:
        self.data = data
        self.start = start
        self.stop = stop
        self.done = False
        self.is_probe = is_probe
        self.since: int | None = None
        self.failure: Failure | None = None
        self.size = stop - start
        self._step = step
        self._weight = weight
        self._is_sharded = is_sharded
        self._is_weighted = False
        self._loss: Tensor | None = None
        self._kept: list[Any] = []
        self._entered = False

    def __len__(self) -> int:
        """Return the samples in this part."""
        return self.stop - self.start

    @property
    def weight(self) -> float:
        """Share of this part in the mean over the batch: multiply the mean loss by it."""
        self._is_weighted = True
        return self._weight

    def backward(self, loss: Tensor, *, scaler: torch.amp.GradScaler | None = None) -> None:
        """Run the backward pass of ``loss``, weighted so that the parts add up to the batch's mean.

        Args:
            loss: mean over this part's samples (or over what ``count`` counts), a scalar.
            scaler: the loss scaling of mixed precision.
        """
        weight = self.weight
        # a mean over nothing is no number, whatever it is multiplied by
        if not weight:
            if self._is_sharded:  # the other ranks wait for this one's share
                torch.autograd.backward(loss, torch.zeros_like(loss))
            return
        share = loss if weight == 1.0 else loss * weight
        torch.autograd.backward(share if scaler is None else scaler.scale(share))
        self._loss = share.detach()

    def add_loss(self, share: Tensor) -> None:
        """Count a loss that is weighted already; its backward pass is the framework's."""
        self._loss = share.detach()

    def keep(self, value: Any) -> None:
        """Put a result of this part into :attr:`MicroBatches.kept`, if the body goes through."""
        self._kept.append(value)

    def __enter__(self) -> MicroBatch:
        self._entered = True
        self.since = autograd_sequence_number(torch)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, frames: Any) -> bool:
        if error is None:
            # a probe's gradients were made for it
            if not (self._is_weighted or self.start or self.is_probe):
                self._step.must_have_no_gradients()
            self.done = True
            # a part without samples of its own is there for the other ranks
            self._step.part_done(self._loss, self._kept if len(self) else [])
            return False
        if not isinstance(error, Exception):
            self._step.leave()
            return False
        is_repeated = self._step.part_failed(self, error)
        self.data, self._loss, self._kept = None, None, []
        return is_repeated

    def must_have_been_used(self) -> None:
        """Raise RuntimeError for a loop without ``with``."""
        if not self._entered:
            raise RuntimeError(NOT_ENTERED)
