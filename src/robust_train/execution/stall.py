"""An attempt that runs but gets nowhere: a deadlock, a dead peer, a hung file system."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from robust_train.events import Event, Failed, Finished, Progress, TrainingStarted

DUMP_STACKS = signal.SIGRTMAX - 1
"""Asks an attempt for that; trainers and schedulers have uses for SIGUSR1 and SIGUSR2."""

STACKS_SECONDS = 1.0
"""Time that a stalled attempt gets to write down what its threads are doing."""


class StallWatch:
    """Counts the time since an attempt last reported progress.

    It starts to count at the first such report: a trainer that never reports is never stalled.

    Args:
        timeout_seconds: without progress for so long the attempt is stalled; 0 for never.
        clock: seconds of a monotonic clock.
    """

    def __init__(self, timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_seconds = timeout_seconds
        self._clock = clock
        self._last: float | None = None

    def on_event(self, event: Event) -> None:
        """Take an event of the attempt into account."""
        if isinstance(event, (Finished, Failed)):
            self.end()
        elif self.timeout_seconds > 0 and isinstance(event, (TrainingStarted, Progress)):
            self._last = self._clock()

    def seconds_left(self) -> float | None:
        """Return the seconds until it is stalled, 0 when it is; None while it is not counted."""
        if self._last is None:
            return None
        return max(self._last + self.timeout_seconds - self._clock(), 0.0)

    def end(self) -> None:
        """Stop counting."""
        self._last = None
