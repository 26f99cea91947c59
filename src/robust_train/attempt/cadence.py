"""Decides when to save a checkpoint: often if saves are cheap, and more often if the job fails.

:class:`.live.LiveAttempt` asks :class:`SaveClock` after each step, in the process that trains. Each
save calls ``begin``, then ``copied`` if training continues during the write, and finally ``saved``
or ``failed``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from robust_train.config.training_plans import SavePlan

SHORTEST_SECONDS = 10.0
LONGEST_SECONDS = 300.0
"""The limits of the time between two checkpoints."""

LEAST_SECONDS = 1.0
"""The shortest time between two checkpoints of a job that fails often, and before the first
checkpoint, which measures the cost of a save."""

LARGEST_SHARE = 0.01
"""The largest share of the time that may be spent on saving, and on reading checkpoints back."""

OWED_SECONDS = 60.0
"""The time after which a failed save is tried again."""

_FIRST_COSTS = 6.0
"""A job's first save takes this many times as long as later saves, because it also allocates the
memory for the copy."""


def seconds_between_saves(cost: float, failures: int, seconds: float) -> float:
    """Return the time between two checkpoints in seconds.

    The first checkpoint is saved after a second. From then on, saving takes at most 1 % of the
    time, with 10 seconds to 5 minutes between checkpoints. A failure costs half an interval on
    average. An interval of √(2 × cost × mean time between failures) loses the least time in total
    (Young 1974, doi:10.1145/361147.361115), so a job that has failed uses Young's interval if it is
    shorter.

    A job that has not failed is treated as if it had failed once. If Young's interval is then below
    10 seconds, it replaces the lower limit of 10 seconds.

    Args:
        cost: the seconds for which a save holds up training, 0 if unknown.
        failures: the number of failures so far.
        seconds: the time since the job began.
    """
    youngs_interval = math.sqrt(2 * cost * max(seconds, 0.0) / max(failures, 1))
    youngs_interval = max(youngs_interval, LEAST_SECONDS)
    shortest = SHORTEST_SECONDS
    if not failures:
        shortest = min(youngs_interval, SHORTEST_SECONDS)
    interval = min(max(cost / LARGEST_SHARE, shortest), LONGEST_SECONDS)
    return min(interval, youngs_interval) if failures else interval


class SaveClock:
    """Measures the cost of saves, and decides when the next checkpoint is due."""

    def __init__(
        self,
        plan: SavePlan,  # the settings of the config
        *,
        # Seconds for which the job's last save held up training, 0 if unknown.
        cost: float = 0.0,
        # Number of the job's earlier attempts.
        failures: int = 0,
        job_seconds: float = 0.0,  # time since the job's first launch
        now: Callable[[], float] = time.monotonic,  # the clock, in seconds
    ) -> None:
        self._plan = plan
        self._cost = cost
        self._failures = failures
        self._now = now
        self._began = now() - job_seconds  # the start of the job on this clock
        self._last_written = now()
        # The start of the last save, and the step at that time.
        self._saved_at = now()
        self._saved_step: int | None = None
        # The start of a save that still holds up training, None without such a save.
        self._saving_since: float | None = None
        self._has_saved = False
        self._retries_at = 0.0  # set after a failed save
        self._calls = 0
        self.interval = 0.0  # seconds between the last two written checkpoints
        self.spent = 0.0  # seconds for which saves have held up training

    def is_due(self, step: int | None) -> bool:
        """Return whether to save after optimizer step ``step``. If ``step`` is None, each call
        counts as a step."""
        self._calls += 1
        if step is None:
            step = self._calls
        if self._saved_step is None:
            self._saved_step = step - 1
        now = self._now()
        plan = self._plan
        if self._retries_at:
            return now >= self._retries_at
        if plan.every_steps and step - self._saved_step >= plan.every_steps:
            return True
        every = plan.every_seconds
        if every is None:
            since = now - self._began
            every = seconds_between_saves(self._cost, self._failures, since)
        return now - self._saved_at >= every

    def begin(self, step: int | None) -> None:
        """Record the start of a save."""
        self._mark(step)
        self._saving_since = self._saved_at
        # This save is the retry, so another save is not due until its write has ended.
        self._retries_at = 0.0

    def copied(self) -> None:
        """Record that training continues while a copy is written."""
        if self._saving_since is not None:
            seconds = self._now() - self._saving_since
            self.spent += seconds
            if self._has_saved:
                self._cost = seconds
            else:
                # The first save also allocates the memory that the next saves use again.
                expected = self._cost if self._cost else seconds / _FIRST_COSTS
                self._cost = min(seconds, expected)
            self._has_saved = True
        self._saving_since = None

    def failed(self) -> None:
        """Record that the checkpoint could not be written, so that a save is due in a minute."""
        self._saving_since = None
        self._retries_at = self._now() + OWED_SECONDS

    def saved(self, step: int | None) -> float:
        """Record that a checkpoint is on the disk. Return the seconds for which its save held up
        training, 0 if unknown."""
        self._retries_at = 0.0
        now = self._now()
        self.interval = now - self._last_written
        self._last_written = now
        # The next save may have begun before this checkpoint was on the disk.
        if step is None or self._saved_step is None or step >= self._saved_step:
            self.copied()
            self._mark(step)
        return self._cost

    def _mark(self, step: int | None) -> None:
        self._saved_at = self._now()
        self._saved_step = self._calls if step is None else step
