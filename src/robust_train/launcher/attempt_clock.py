"""When an attempt that does not end is ended."""

from __future__ import annotations

import time

from robust_train.model.events import Event, Failed, Finished

AFTER_FAILURE_SECONDS = 10.0
"""How long the process of an attempt that has reported its failure may take to end."""

_AFTER_KILL_SECONDS = 8.0


class AttemptClock:
    """Limits the time of one attempt.

    Args:
        stop_grace_seconds: from a request to stop, or the report of the result, to the kill.

    Attributes:
        is_stopping: a signal has asked the attempt to stop.
    """

    def __init__(self, stop_grace_seconds: float) -> None:
        self._grace_seconds = stop_grace_seconds
        self._kill_at: float | None = None
        self._gone_at: float | None = None
        self.is_stopping = False

    @property
    def is_set(self) -> bool:
        """Whether the attempt is going to be killed."""
        return self._kill_at is not None

    @property
    def has_killed(self) -> bool:
        """Whether the attempt was killed."""
        return self._gone_at is not None

    @property
    def gives_up(self) -> bool:
        """Whether the attempt was killed long ago and still lives."""
        return self._gone_at is not None and time.monotonic() >= self._gone_at

    def stop(self) -> None:
        """Handle a signal: the first leaves time for a checkpoint, the second none."""
        self.kill_in(0.0 if self.is_stopping else self._grace_seconds)
        self.is_stopping = True

    def on_event(self, event: Event) -> None:
        """Record an event: after the attempt's end, that of its process has to follow."""
        if isinstance(event, (Finished, Failed)):
            is_failure = isinstance(event, Failed)
            self.kill_in(AFTER_FAILURE_SECONDS if is_failure else self._grace_seconds)

    def kills_now(self) -> bool:
        """Return whether it is time for SIGKILL, which is sent again every second."""
        now = time.monotonic()
        if self._kill_at is None or now < self._kill_at:
            return False
        self._kill_at = now + 1.0
        self._gone_at = self._gone_at or now + _AFTER_KILL_SECONDS
        return True

    def seconds_left(self, most: float) -> float:
        """Return the seconds until something is due, at most ``most``."""
        left = (
            most
            if self._kill_at is None
            else min(most, self._kill_at - time.monotonic())
        )
        return max(left, 0.0)

    def kill_in(self, seconds: float) -> None:
        """Have it killed after so long, unless that is due earlier."""
        at = time.monotonic() + seconds
        self._kill_at = at if self._kill_at is None else min(at, self._kill_at)
