"""An attempt's losses and weight updates, which a feature may watch.

:class:`.live.LiveAttempt` passes each loss and each update to its :class:`LossWatch`, in the
process that trains. The divergence feature replaces it with a subclass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from robust_train.step.update import Answer, LateUpdates, Update

# The sources of a step's loss: `run.backward`, `run.progress` or an integration. If a step has
# several losses, the loss from the source with the highest number counts.
COMPUTED = 0
REPORTED = 1
GIVEN = 2


class LossWatch:
    """Makes every update, whatever the loss is.

    A feature that watches losses replaces it with a subclass (:meth:`.live.LiveAttempt.watch`).

    Attributes:
        leaves_out: whether updates that would spoil the weights are skipped.
    """

    leaves_out = False

    def __init__(self) -> None:
        self._late_updates: LateUpdates | None = None

    def take(self, step: int, loss: Any, source: int = GIVEN) -> None:
        """Receive the loss of a step, which may be a tensor. ``source`` names its origin."""

    def computed(self, step: int, loss: Tensor) -> None:
        """Receive the loss of a batch in the current step."""

    def step(
        self, number: int, optimizer: Optimizer, scaler: Any, max_grad_norm: float | None
    ) -> bool:
        """End an optimizer step. See :meth:`.run.Run.step` for the result."""
        # This imports torch, which the launcher does not have.
        from robust_train.step.update import update

        done = update(optimizer, None, scaler, max_grad_norm, skips=False)
        return self.answer_after(number, done).moved

    def answer_after(self, number: int, done: Update) -> Answer:
        """Return what the host knows about the updates so far, after another update."""
        if self._late_updates is None:
            from robust_train.step.update import LateUpdates

            self._late_updates = LateUpdates()
        return self._late_updates.after(number, done)

    def allows_checkpoint(self) -> bool:
        """Return whether the weights are worth a checkpoint."""
        return True

    def of_checkpoint(self, step: int | None) -> str:
        """Return the value of ``loss`` in the manifest of a checkpoint of this step."""
        return "unknown"

    def proves(self, step: int) -> bool:
        """Return whether enough good steps have followed a step to prove it good."""
        return False
