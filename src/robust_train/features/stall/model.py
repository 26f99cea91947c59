"""Whether an attempt hangs: a pure rule over the signs of life that :mod:`.launcher` sees."""

from __future__ import annotations

from dataclasses import dataclass, replace

from robust_train.config.values import AUTO, FROM_0, key
from robust_train.model.feature import FeatureKeys
from robust_train.readable import duration

SHORTEST_SECONDS = 600.0  # no learned limit is shorter
STARTUP_SECONDS = 1800.0  # before the first progress, no learned limit is shorter
_LONGEST_PAUSES = 5.0  # the learned limit, as a multiple of the longest pause so far
_BUSY_TIMES = 12.0  # the limit of an attempt that computes or prints, as a multiple of that
WARNING_SHARE = 0.5  # share of the limit after which a line warns


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
        """Seconds without progress after which an attempt hangs. 0: never, None: learned."""
        return None if self.stall_timeout_minutes is None else 60 * self.stall_timeout_minutes


@dataclass(frozen=True)
class Pulse:
    """Signs of life of an attempt, in seconds on a clock that stops while it is suspended.

    A report of progress counts from the first optimizer step on. Output, CPU time, a busy GPU and
    any event are signs of life as well.
    """

    now: float = 0.0
    begun: float = 0.0  # the start of training, or of the attempt until that is reported
    reported: float | None = None  # the last progress, None before the first
    alive: float = 0.0  # the last sign of life
    # The longest pause between two reports, also in the job's earlier attempts.
    longest: float = 0.0

    def after_progress(self) -> Pulse:
        """Return the pulse with a report of progress now.

        Up to the first report, a fifth of the time counts as a pause. So the learned limit is at
        least that time, whether it was an epoch or only the start.
        """
        if self.reported is None:
            pause = (self.now - self.begun) / _LONGEST_PAUSES
        else:
            pause = self.now - self.reported
        return replace(self, reported=self.now, alive=self.now, longest=max(self.longest, pause))


@dataclass(frozen=True)
class Standstill:
    """The seconds for which an attempt has made no progress, and their limit."""

    seconds: float
    limit_seconds: float
    before_progress: bool  # it has not reported any

    @property
    def share(self) -> float:
        """Share of the limit that is used up: from 1 on the attempt hangs."""
        return self.seconds / self.limit_seconds

    @property
    def what(self) -> str:
        """A description of the missing sign of life, and for how long it has been missing."""
        if self.before_progress:
            return f"no progress, output, CPU time or GPU use for {duration(self.seconds)}"
        return f"no progress for {duration(self.seconds)}"


def standstill(limit_seconds: float | None, pulse: Pulse) -> Standstill | None:
    """Return for how long an attempt has made no progress, or None without a limit.

    Before the first progress only silence counts, since scripts report none and a start may take
    long. With a learned limit, an attempt that computes or prints has twelve times as long, because
    an evaluation may be slower than everything before.

    Args:
        limit_seconds: the user's limit. 0: never, None: learned from the job's pauses.
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


def worth_keeping(longest: float, longest_so_far: float) -> bool:
    """Return whether a pause raises the learned limit by enough for a line on the disk."""
    return longest > max(1.25 * longest_so_far, SHORTEST_SECONDS / _LONGEST_PAUSES)
