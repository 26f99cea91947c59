"""Watches the losses and updates of an attempt for divergence, in the process that trains.

`WatchesLosses` installs a `Guard`, which receives each loss and makes each update. The guard skips
an update that would spoil the weights, and raises `TrainingDiverged` if losses stay bad. It reads
a loss from the GPU a step late, so that training does not wait for the GPU. `Losses` decides when
training has diverged, and is pure.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from robust_train.attempt.hooks import InAttempt
from robust_train.attempt.live import LiveAttempt
from robust_train.attempt.losses import COMPUTED, GIVEN, LossWatch
from robust_train.features.divergence.model import DivergenceKeys
from robust_train.features.divergence.record import DivergedFinding, RepeatFinding
from robust_train.files import to_plain
from robust_train.model.errors import TrainingDiverged
from robust_train.model.events import UpdateSkipped
from robust_train.model.failure import Evidence, Failure, FailureKind

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from robust_train.step.update import LateFigures

log = logging.getLogger("robust_train")

_RECENT = 128  # good losses that a loss is compared with to find a spike
_LEAST_RECENT = 16  # with fewer losses, no loss counts as a spike
_STEPS_TO_PROVE = 100  # good steps that prove an earlier checkpoint good
# Multiple of `patience` for spikes. A spike may pass, but a loss that is not finite does not.
_SPIKES = 10
# Multiple of `patience` for skipped updates, because they leave the weights unchanged.
_SKIPS = 3
# Factor from the median absolute deviation to the standard deviation of a normal distribution.
_SIGMA = 1.4826


@dataclass(frozen=True)
class Losses:
    """The reported losses so far."""

    good_step: int | None = None  # last step with a good loss
    bad_since: int = 0  # first step of the current run of bad losses
    bad_loss: float = 0.0  # the last bad loss
    bad: int = 0  # number of bad losses in a row
    not_finite: int = 0  # number of losses among them that are not finite
    # Recent good losses, or only the last good loss if spikes are not detected.
    recent: tuple[float, ...] = ()

    def after(self, step: int, loss: float, plan: DivergenceKeys) -> Losses:
        """Return the losses after another loss."""
        is_finite = math.isfinite(loss)
        if is_finite and not self._is_spike(loss, plan):
            most = _RECENT if plan.spike_sigma else 1
            return Losses(step, recent=(self.recent + (loss,))[-most:])
        bad_since = self.bad_since if self.bad else step
        not_finite = self.not_finite if is_finite else self.not_finite + 1
        return replace(
            self, bad_since=bad_since, bad_loss=loss, bad=self.bad + 1, not_finite=not_finite
        )

    def _is_spike(self, loss: float, plan: DivergenceKeys) -> bool:
        if not plan.spike_sigma or len(self.recent) < _LEAST_RECENT:
            return False
        middle = statistics.median(self.recent)
        spread = statistics.median(abs(value - middle) for value in self.recent)
        return loss - middle > plan.spike_sigma * _SIGMA * spread

    def of_checkpoint(self, step: int | None) -> str:
        """Return the quality of a checkpoint of this step, for its manifest: ``finite``,
        ``diverged`` or ``unknown``."""
        good = self.good_step
        is_before = step is not None and good is not None and step <= good
        if self.not_finite and not is_before:
            return "diverged"
        return "unknown" if good is None else "finite"

    def why_diverged(self, plan: DivergenceKeys) -> str:
        """Return the evidence that training has diverged, empty if it has not."""
        if self.not_finite >= plan.patience:
            what = f"the loss is {self.bad_loss}"
        elif self.bad >= _SPIKES * plan.patience:
            what = f"the loss is {self.bad_loss:.4g}, far above its median,"
        else:
            return ""
        return f"{what} since step {self.bad_since}{self.last_good}"

    @property
    def last_good(self) -> str:
        """The last good loss, for the end of a sentence."""
        if self.good_step is None:
            return "; no loss before it was finite in this attempt"
        return f"; the last good loss was {self.recent[-1]:.4g} at step {self.good_step}"


class WatchesLosses(InAttempt):
    """Installs the guard that receives losses and makes updates, unless the user sets
    ``divergence.action=ignore``."""

    def begin(self) -> None:
        """Install the guard."""
        divergence = self.config.of(DivergenceKeys)
        if divergence.action != "ignore":
            self.live.watch(Guard(self.live, divergence))


class Guard(LossWatch):
    """Watches an attempt, and raises `TrainingDiverged` once training is useless.

    Attributes:
        divergence: the thresholds of divergence.
        losses: the losses so far.
    """

    leaves_out = True

    def __init__(self, live: LiveAttempt, divergence: DivergenceKeys) -> None:
        super().__init__()
        self.divergence = divergence
        self.losses = Losses()
        self._live = live
        self._good_since = time.time()  # about when the last good loss was reported
        self._source = COMPUTED
        self._late_losses: LateFigures | None = None
        # Whether the trainer ends its optimizer steps with `step`, which then takes their losses.
        self._makes_updates = False
        self._loss: Tensor | None = None  # loss of the current step
        self._skipped = 0  # number of skipped updates in a row
        self._skips_from = 0  # the step of the first of them

    def of_checkpoint(self, step: int | None) -> str:
        """Return the quality of a checkpoint of this step, for its manifest."""
        return self.losses.of_checkpoint(step)

    def allows_checkpoint(self) -> bool:
        """Return whether the weights are worth saving."""
        return not self.losses.not_finite

    def proves(self, step: int) -> bool:
        """Return whether enough good steps followed a step to prove its checkpoint good."""
        good = self.losses.good_step
        return good is not None and good - step >= _STEPS_TO_PROVE

    # --- losses ---

    def computed(self, step: int, loss: Tensor) -> None:
        """Receive the loss of a batch."""
        self._loss = loss if self._loss is None else self._loss + loss
        # If the trainer calls `step`, the loss is checked there, before the update.
        if not self._makes_updates:
            self.take(step, loss, COMPUTED)

    def take(self, step: int, loss: Any, source: int = GIVEN) -> None:
        """Receive the loss of a step.

        A tensor is read a step later, when its value is available without waiting for the GPU. A
        trainer may pass the same loss in several ways: a reported loss replaces a computed loss,
        and a loss that the user gives replaces both.
        """
        if source < self._source:
            return
        self._source = source
        if hasattr(loss, "detach"):
            if not self._late_losses:
                # This module imports torch, which some trainers do not use.
                from robust_train.step.update import LateFigures

                self._late_losses = LateFigures()
            earlier = self._late_losses.swap(step, loss)
            if earlier is not None:
                self._look_at(*earlier)
            return
        figure = to_plain(loss)
        if isinstance(figure, (int, float)):
            self._look_at(step, figure)

    def _look_at(self, step: int, loss: float) -> None:
        """Record a loss.

        Raises:
            TrainingDiverged: training has diverged.
        """
        # `step` skipped the update of a loss that is not finite, so the weights are intact.
        if self._makes_updates and not math.isfinite(loss):
            return
        self.losses = self.losses.after(step, loss, self.divergence)
        if not self.losses.bad:
            self._good_since = time.time()
        why = self.losses.why_diverged(self.divergence)
        if why:
            raise self._diverged(f"diverged: {why}", self.losses.good_step, step)

    # --- updates ---

    def step(
        self, number: int, optimizer: Optimizer, scaler: Any, max_grad_norm: float | None
    ) -> bool:
        """End an optimizer step, and skip an update that would spoil the weights."""
        from robust_train.step.update import update

        self._makes_updates = True
        loss = self._loss
        self._loss = None
        answer = self.answer_after(number, update(optimizer, loss, scaler, max_grad_norm))
        if answer.checked is not None:
            self._count_update(*answer.checked)
        return answer.moved

    def _count_update(self, step: int, was_skipped: bool) -> None:
        """Count skipped updates in a row.

        Raises:
            TrainingDiverged: too many updates in a row were skipped.
        """
        if not was_skipped:
            self._skipped = 0
            return
        if not self._skipped:
            self._skips_from = step
        self._skipped += 1
        if self._live.is_main:
            self._live.reports.send(UpdateSkipped(step, self._skipped))
            log.warning("step %d: loss or gradient norm is not finite: the update is skipped", step)
        if self._skipped > _SKIPS * self.divergence.patience:
            first = self._skips_from
            why = (
                "diverged: loss or gradient norm was not finite in "
                f"{self._skipped} updates in a row from step {first} on{self.losses.last_good}"
            )
            # A trainer may not count a skipped step, although it has used its data.
            last = first + self._skipped - 1
            raise self._diverged(why, first - 1, last)

    # --- the end ---

    def _diverged(self, message: str, good: int | None, bad: int) -> TrainingDiverged:
        """Mark the checkpoints after the last good step as spoiled, and return the error to raise.

        Args:
            message: the start of the error's message.
            good: the last good step, None if no step of this attempt was good.
            bad: the last step whose loss was checked.
        """
        saves = self._live.saves
        start = self._live.reports.steps_before
        if good is None or good <= start:
            # No step of this attempt was good, so the checkpoint it started from may be spoiled.
            good = start - 1
        before = saves.spoil(good, self._good_since)
        where = "no checkpoint before it"
        if before is not None:
            step = "" if before.step is None else f" (step {before.step})"
            where = f"the checkpoint before it is {before.path.name}{step}"
            # An attempt that started from there skipped data, which the count of steps lacks.
            if saves.passes_over and before.step == start:
                bad += max(saves.skips_to - start, 0)
        evidence = Evidence(has_checkpoint=before is not None).having(
            DivergedFinding(good, bad),
            RepeatFinding(saves.passes_over, reads_lr=self._live.has_read("lr")),
        )
        return TrainingDiverged(Failure(FailureKind.DIVERGED, f"{message}; {where}", evidence))
