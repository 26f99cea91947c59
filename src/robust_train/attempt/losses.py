"""Receives an attempt's losses and makes its updates, in the process that trains. A feature may
replace it to watch them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from robust_train.step.update import Answer, LateUpdates, Update

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
        self._late_updates: LateUpdates | None = None

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
        return self.answer_after(number, done).moved

    def answer_after(self, number: int, done: Update) -> Answer:
        """Return what the host knows of the updates so far, after another update."""
        if self._late_updates is None:
            from robust_train.step.update import LateUpdates

            self._late_updates = LateUpdates()
        return self._late_updates.after(number, done)

    def allows_checkpoint(self) -> bool:
        """Return whether the weights are worth a checkpoint."""
        return True

    def of_checkpoint(self, step: int | None) -> str:
        """Return a checkpoint's quality, as its manifest has it."""
        return "unknown"

    def proves(self, step: int) -> bool:
        """Return whether enough good steps have followed a step to prove it good."""
        return False
