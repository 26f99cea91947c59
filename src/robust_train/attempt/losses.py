"""What becomes of an attempt's losses and updates: nothing, unless a feature watches them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from robust_train.step.update import Answer, LateUpdates, Update

# whose figure a loss is; a later one of these counts in place of those before it
COMPUTED, REPORTED, GIVEN = range(3)


class LossWatch:
    """Takes each loss as good and makes each update.

    A feature that knows better puts a subclass in its place (:meth:`.live.LiveAttempt.watch`).

    Attributes:
        leaves_out: whether an update that would spoil the weights is left out.
    """

    leaves_out = False

    def __init__(self) -> None:
        self._late_updates: LateUpdates | None = None

    def take(self, step: int, loss: Any, source: int = GIVEN) -> None:
        """Take the loss of a step, which may be a tensor; ``source`` says whose figure it is."""

    def computed(self, step: int, loss: Tensor) -> None:
        """Take the loss of a batch of the step in progress."""

    def step(
        self, number: int, optimizer: Optimizer, scaler: Any, max_grad_norm: float | None
    ) -> bool:
        """End an optimizer step; see :meth:`.run.Run.step` for what it returns."""
        # torch comes with it, and the launcher does without
        from robust_train.step.update import update

        done = update(optimizer, None, scaler, max_grad_norm, skips=False)
        return self.answer_after(number, done).moved

    def answer_after(self, number: int, done: Update) -> Answer:
        """Return what the host knows of updates after one more of them."""
        if self._late_updates is None:
            from robust_train.step.update import LateUpdates

            self._late_updates = LateUpdates()
        return self._late_updates.after(number, done)

    def allows_checkpoint(self) -> bool:
        """Return whether the weights are worth a checkpoint."""
        return True

    def of_checkpoint(self, step: int | None) -> str:
        """Return what is known of a checkpoint of ``step``, as a manifest has it."""
        return "unknown"

    def proves(self, step: int) -> bool:
        """Return whether so much that is good has followed a step that it was good."""
        return False
