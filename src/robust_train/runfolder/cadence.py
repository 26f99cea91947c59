"""When to save a checkpoint: often where that is cheap, more often where a job fails often."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

AUTO = "auto"

SHORTEST_SECONDS, LONGEST_SECONDS = 10.0, 300.0
SHORTEST_AFTER_FAILURE_SECONDS = 1.0
_LARGEST_SHARE = 0.01


def seconds_between_saves(cost: float | None, failures: int, seconds: float) -> float:
    """Return the time between two checkpoints.

    Saving takes at most 1 % of the time, with 10 seconds to 5 minutes between two. A job that fails
    loses half the interval on average: shorter after failures, where less is lost at
    √(2 × cost × mean time between failures) (Young 1974, doi:10.1145/361147.361115).

    Args:
        cost: for how many seconds a save holds training up, None if not yet known.
        failures: how often the job has failed so far.
        seconds: since when, the time in which it did.
    """
    if cost is None:
        return SHORTEST_SECONDS
    interval = min(max(cost / _LARGEST_SHARE, SHORTEST_SECONDS), LONGEST_SECONDS)
    if failures <= 0:
        return interval
    loses_least = math.sqrt(2 * cost * max(seconds, 0.0) / failures)
    return min(interval, max(loses_least, SHORTEST_AFTER_FAILURE_SECONDS))


@dataclass(frozen=True)
class SavePlan:
    """What the config says about checkpoints.

    Attributes:
        every_seconds: longest time between two; None: as often as saving is cheap.
        every_steps: most optimizer steps between two; None or 0: any number.
    """

    every_seconds: float | None = None
    every_steps: int | None = None

    @classmethod
    def of(cls, cfg: Mapping[Any, Any]) -> SavePlan:
        """Read ``training.checkpoint_every_minutes`` and ``training.checkpoint_every_steps``."""
        training = cfg["training"]
        minutes = training.get("checkpoint_every_minutes", AUTO)
        every = None if minutes in (None, "", AUTO) else 60 * float(minutes)
        return cls(every, int(training.get("checkpoint_every_steps") or 0) or None)


class SaveClock:
    """Measures what saving costs and when the next checkpoint is due.

    Args:
        plan: what the config says.
        cost: seconds that the job's last save has taken, None if not known.
        failures: attempts of the job that have ended before this one.
        job_started: first launch of the job, seconds since the epoch.
        now: the clock, in seconds.
    """

    def __init__(
        self,
        plan: SavePlan,
        *,
        cost: float | None = None,
        failures: int = 0,
        job_started: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._cost = cost
        self._failures = failures
        self._now = now
        # of the job, on this clock
        self._began = now() - (0.0 if job_started is None else max(time.time() - job_started, 0.0))
        self._saved_at = now()
        self._saved_step: int | None = None
        self._saving_since: float | None = None
        self._looks = 0

    def is_due(self, step: int | None) -> bool:
        """Return whether to save after optimizer step ``step``; None counts the calls."""
        self._looks += 1
        step = self._looks if step is None else step
        if self._saved_step is None:
            self._saved_step = step - 1
        if self._plan.every_steps and step - self._saved_step >= self._plan.every_steps:
            return True
        now = self._now()
        every = self._plan.every_seconds
        if every is None:
            every = seconds_between_saves(self._cost, self._failures, now - self._began)
        return now - self._saved_at >= every

    def begin(self, step: int | None) -> None:
        """Saving begins now."""
        self._saving_since = self._saved_at = self._now()
        self._saved_step = self._looks if step is None else step

    def copied(self) -> None:
        """What is to be saved was copied: training goes on while the copy is written."""
        if self._saving_since is not None:
            self._cost = self._now() - self._saving_since
        self._saving_since = None

    def saved(self, step: int | None) -> float | None:
        """Return for how many seconds the save held training up, None if that is not known."""
        self.copied()
        self._saved_at = self._now()
        self._saved_step = self._looks if step is None else step
        return self._cost
