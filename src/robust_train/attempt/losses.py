"""Receives an attempt's losses and makes its updates, in the process that trains. A feature may
replace it to watch them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from robust_train.step.update import LateAnswers, Update

# The sources of a loss. A later source counts instead of an earlier one.
COMPUTED, REPORTED, GIVEN = range(3)


class LossWatch:
    """Accepts each loss as good and makes each update.

    A feature that watches losses puts a subclass in its place (:meth:`.live.LiveAttempt.watch`).

    Attributes:
        leaves_out: whether an update that would spoil the weights is skipped.
    """

    leaves_out = False

    def __init__(self) -> None:
        self._answers: LateAnswers | None = None

    def take(self, step: int, loss: Any, source: int = GIVEN) -> None:
        """Receive the loss of a step, which may be a tensor. ``source`` names its origin."""

    def computed(self, step: int, loss: Tensor) -> None:
        """Receive the loss of a batch of the current step."""

    def step(
        self, number: int, optimizer: Optimizer, scaler: Any, max_grad_norm: float | None
    ) -> bool:
        """End an optimizer step, see :meth:`.run.Run.step` for the result."""
        # This imports torch, which the launcher does not have.
        from robust_train.step.update import update

        done = update(optimizer, None, scaler, max_grad_norm, skips=False)
        return self.has_moved(number, done)

    def has_moved(self, number: int, done: Update) -> bool:
        """Return the result of :meth:`step` for an update."""
        if self._answers is None:
            from robust_train.step.update import LateAnswers

            self._answers = LateAnswers()
        return self._answers.moved(number, done)

    def allows_checkpoint(self) -> bool:
        """Return whether the weights are worth a checkpoint."""
        return True

    def of_checkpoint(self, step: int | None) -> str:
        """Return a checkpoint's quality, as its manifest has it."""
        return "unknown"

    def proves(self, step: int) -> bool:
        """Return whether enough good steps have followed a step to prove it good."""
        return False
