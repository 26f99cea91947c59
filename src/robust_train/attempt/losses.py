"""What the losses of an attempt show: whether training has diverged, and since when. Pure."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

from robust_train.config.schema import DivergenceConfig

_RECENT = 128
_LEAST_RECENT = 16
_SPIKES = 10  # times `patience`: a spike may pass, a loss that is not finite does not
# median absolute deviation to standard deviation, of a normal distribution
_SIGMA = 1.4826


@dataclass(frozen=True)
class Losses:
    """The losses that were reported so far."""

    good_step: int | None = None  # the last one with a good loss
    good_loss: float | None = None
    bad_since: int | None = None  # first step of the last bad ones in a row
    bad_loss: float = 0.0
    bad: int = 0  # reports in a row that are not good
    not_finite: int = 0  # of these
    recent: tuple[float, ...] = ()  # good ones, where spikes are looked for

    def after(self, step: int, loss: float, plan: DivergenceConfig) -> Losses:
        """Return the losses with one more."""
        is_finite = math.isfinite(loss)
        if is_finite and not self._is_spike(loss, plan):
            recent = (*self.recent, loss)[-_RECENT:] if plan.spike_sigma else ()
            return Losses(step, loss, recent=recent)
        return replace(
            self,
            bad_since=step if not self.bad else self.bad_since,
            bad_loss=loss,
            bad=self.bad + 1,
            not_finite=self.not_finite + (not is_finite),
        )

    def _is_spike(self, loss: float, plan: DivergenceConfig) -> bool:
        if not plan.spike_sigma or len(self.recent) < _LEAST_RECENT:
            return False
        middle = statistics.median(self.recent)
        spread = statistics.median(abs(one - middle) for one in self.recent)
        return loss - middle > plan.spike_sigma * _SIGMA * spread

    def of_checkpoint(self, step: int | None) -> str:
        """Return what is known of a checkpoint of ``step``, as a manifest has it."""
        good = self.good_step
        is_before = step is not None and good is not None and step <= good
        if self.not_finite and not is_before:
            return "diverged"
        return "unknown" if self.good_step is None else "finite"

    def diverged(self, plan: DivergenceConfig) -> str | None:
        """Return what shows that training has diverged, None if nothing does."""
        if self.not_finite >= plan.patience:
            what = f"the loss is {self.bad_loss}"
        elif self.bad >= _SPIKES * plan.patience:
            what = f"the loss is {self.bad_loss:.4g}, far above its median,"
        else:
            return None
        return f"{what} since step {self.bad_since}{self.last_good}"

    @property
    def last_good(self) -> str:
        """The last good loss, for the end of a sentence."""
        if self.good_step is None:
            return "; none before it was finite in this attempt"
        return f"; the last good one was {self.good_loss:.4g} at step {self.good_step}"
