"""Decides whether an attempt hangs, from the signs of life that :mod:`.launcher` sees. Pure.

An attempt hangs if it makes no progress for longer than a limit. The user can set the limit. A
learned limit is five times the longest pause between two reports of progress so far, and at least
ten minutes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from robust_train.config.values import AUTO, FROM_0, key
from robust_train.model.feature import FeatureKeys
from robust_train.readable import duration

SHORTEST_SECONDS = 600.0  # the shortest learned limit
STARTUP_SECONDS = 1800.0  # the shortest learned limit before the first progress
_LONGEST_PAUSES = 5.0  # the learned limit, as a multiple of the longest pause so far
# The limit of an attempt that computes or prints, as a multiple of the learned limit.
_BUSY_TIMES = 12.0
WARNING_SHARE = 0.5  # the share of the limit after which a warning is logged


@dataclass(frozen=True)
class StallKeys(FeatureKeys):
    """``stall_timeout_minutes``."""

    stall_timeout_minutes: float | None = key(
        None,
        "without progress for this long, end the attempt and resume; `0`: never",
        more="`auto`: learned from the job ([hangs](hangs.md))",
        unit="minutes",
        range=FROM_0,
        written=AUTO,
    )

    @property
    def timeout_seconds(self) -> float | None:
        """Seconds without progress after which an attempt hangs. 0 means never, None learned."""
        return None if self.stall_timeout_minutes is None else 60 * self.stall_timeout_minutes


@dataclass(frozen=True)
class Pulse:
    """Times of an attempt's signs of life, in seconds on a clock that stops during a suspension.

    Progress is reported from the first optimizer step onwards. Output, CPU time, a busy GPU and
    events of any kind are signs of life too.
    """

    now: float = 0.0
    # The start of training, or the start of the attempt until training is reported.
    begun: float = 0.0
    reported: float | None = None  # the last report of progress, None before the first
    alive: float = 0.0  # the last sign of life
    # The longest pause between two reports, in this attempt or an earlier attempt of the job.
    longest: float = 0.0

    def after_progress(self) -> Pulse:
        """Return the pulse after a report of progress now.

        A fifth of the time until the first report counts as a pause. The learned limit is five
        pauses, so it is at least that long. The trainer may report only once per epoch.
        """
        if self.reported is None:
            pause = (self.now - self.begun) / _LONGEST_PAUSES
        else:
            pause = self.now - self.reported
        return replace(self, reported=self.now, alive=self.now, longest=max(self.longest, pause))


@dataclass(frozen=True)
class Standstill:
    """How long an attempt has made no progress, and its limit, in seconds."""

    seconds: float
    limit_seconds: float
    before_progress: bool  # whether the attempt has not reported any progress yet

    @property
    def share(self) -> float:
        """The share of the limit that is used up. From 1 on, the attempt hangs."""
        return self.seconds / self.limit_seconds

    @property
    def what(self) -> str:
        """A phrase with the missing signs of life and the time without them."""
        if self.before_progress:
            return f"no progress, output, CPU time or GPU use for {duration(self.seconds)}"
        return f"no progress for {duration(self.seconds)}"


def measure_standstill(limit_seconds: float | None, pulse: Pulse) -> Standstill | None:
    """Return how long an attempt has made no progress, or None if it has no limit.

    Before the first progress, only time without any sign of life counts, because scripts report no
    progress and starting may take long. A learned limit is twelve times as long for an attempt that
    computes or prints, because an evaluation may take longer than any step before it.

    Args:
        limit_seconds: the user's limit. 0 means no limit, and None a learned limit.
        pulse: the signs of life so far.
    """
    if limit_seconds == 0:
        return None
    learned = max(SHORTEST_SECONDS, _LONGEST_PAUSES * pulse.longest)
    silent = pulse.now - pulse.alive
    if pulse.reported is None:
        limit = limit_seconds if limit_seconds else max(STARTUP_SECONDS, learned)
        return Standstill(silent, limit, True)
    quiet = pulse.now - pulse.reported
    if limit_seconds is not None:
        return Standstill(quiet, limit_seconds, False)
    if silent * _BUSY_TIMES >= quiet:
        return Standstill(silent, learned, False)
    return Standstill(quiet, _BUSY_TIMES * learned, False)


def should_record(longest: float, recorded: float) -> bool:
    """Return whether the longest pause exceeds the recorded pause enough to be recorded."""
    return longest > max(1.25 * recorded, SHORTEST_SECONDS / _LONGEST_PAUSES)
