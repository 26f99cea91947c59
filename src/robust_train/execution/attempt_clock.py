"""When an attempt that does not end, or gets nowhere, is ended."""

from __future__ import annotations

import time

from robust_train.events import Event, Failed, Finished, Progress, TrainingStarted

AFTER_FAILURE_SECONDS = 10.0
"""How long the process of an attempt that has reported its failure may take to end."""

_STACKS_SECONDS = 1.0
_AFTER_KILL_SECONDS = 8.0


class AttemptClock:
    """Limits the time of one attempt.

    A stall is counted from the first report of progress: a trainer that never reports is never
    stalled.

    Args:
        stop_grace_seconds: from a request to stop, or the report of the result, to the kill.
        stall_timeout_seconds: without progress for this long it is stalled; 0 for never.

    Attributes:
        is_stopping: a signal has asked the attempt to stop.
    """

    def __init__(self, stop_grace_seconds: float, stall_timeout_seconds: float) -> None:
        self._grace_seconds = stop_grace_seconds
        self._stall_seconds = stall_timeout_seconds
        self._stall_at: float | None = None
        self._kill_at: float | None = None
        self._gone_at: float | None = None
        self.is_stopping = False

    @property
    def is_set(self) -> bool:
        """Whether the attempt is going to be killed."""
        return self._kill_at is not None

    @property
    def gives_up(self) -> bool:
        """Whether it was killed long ago and is still there."""
        return self._gone_at is not None and time.monotonic() >= self._gone_at

    def stop(self) -> None:
        """Take in a signal: the first leaves time for a checkpoint, the second none."""
        self._kill_in(0.0 if self.is_stopping else self._grace_seconds)
        self.is_stopping = True

    def on_event(self, event: Event) -> None:
        """Take in an event: progress, or the attempt's end, which the process's has to follow."""
        if isinstance(event, (Finished, Failed)):
            self._stall_at = None
            is_failure = isinstance(event, Failed)
            self._kill_in(AFTER_FAILURE_SECONDS if is_failure else self._grace_seconds)
        elif self._stall_seconds > 0 and isinstance(event, (TrainingStarted, Progress)):
            self._stall_at = time.monotonic() + self._stall_seconds

    def stalls_now(self) -> bool:
        """Return, once, that it is stalled; it is killed when it has written its stacks."""
        if self._stall_at is None or time.monotonic() < self._stall_at:
            return False
        self._stall_at = None
        self._kill_in(_STACKS_SECONDS)
        return True

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
        due = [at for at in (self._stall_at, self._kill_at) if at is not None]
        return max(min([most, *(at - time.monotonic() for at in due)]), 0.0)

    def _kill_in(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._kill_at = at if self._kill_at is None else min(at, self._kill_at)
