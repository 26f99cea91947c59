"""The uses of a job's time: useful, lost, waiting, starting up. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from robust_train.report.attempts import Launch, TimedAttempt


class Use(str, Enum):
    """A use of a stretch of a job's time; ``docs/report.md`` has the definitions."""

    USEFUL = "useful"
    LOST = "lost"
    WAIT = "wait"
    STARTUP = "startup"
    STOPPED = "stopped"  # between two launches in the same run folder; not part of the wall time


USES = {
    Use.USEFUL: "useful",
    Use.LOST: "lost",
    Use.WAIT: "waiting",
    Use.STARTUP: "starting up",
    Use.STOPPED: "stopped",
}
"""The uses of time for people."""


@dataclass(frozen=True)
class Span:
    """A stretch of time, in seconds since the epoch, and the attempt it belongs to (or None)."""

    use: Use
    start: float
    end: float
    attempt: int | None = None

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


def spans_of(
    launches: Sequence[Launch],
    attempts: Sequence[TimedAttempt],
    kept: Mapping[int, float],
) -> tuple[Span, ...]:
    """Cut all of a job's time into its uses, without gaps or overlaps, oldest first. Launches and
    attempts are oldest first; ``kept`` is from :func:`kept_steps`."""
    starts = [launch.start for launch in launches]
    spans: list[Span] = []
    now = launches[0].start if launches else 0.0
    for index, launch in enumerate(launches):
        own = [a for a in attempts if bisect_right(starts, a.started) == index + 1]
        away = [Span(Use.STOPPED, now, launch.start)] if index else []
        for span in (*away, *_of_launch(launch, own, kept)):
            # in a damaged journal, two attempts may overlap
            start = max(span.start, now)
            if span.end > start:
                spans.append(Span(span.use, start, span.end, span.attempt))
                now = span.end
    return tuple(spans)


def totals(spans: Sequence[Span]) -> dict[str, float]:
    """Return the seconds of each use by its name, and their sum without stops as ``wall``."""
    seconds = {u.value: math.fsum(s.seconds for s in spans if s.use is u) for u in Use}
    wall = math.fsum(s.seconds for s in spans if s.use is not Use.STOPPED)
    return {**seconds, "wall": wall}


def kept_steps(
    attempts: Sequence[TimedAttempt], *, completed: bool
) -> dict[int, float]:
    """Return the last step of each attempt, by its number, that no later attempt repeated. If the
    job did not complete, steps after its last checkpoint are not kept either."""
    kept: dict[int, float] = {}
    bound = math.inf
    if not completed:
        bound = max((step for a in attempts for step, _ in a.checkpoints), default=0)
    for attempt in reversed(attempts):
        kept[attempt.number] = math.inf if attempt.outcome == "completed" else bound
        bound = min(bound, attempt.start_step)
    return kept


def _of_launch(
    launch: Launch, attempts: Sequence[TimedAttempt], kept: Mapping[int, float]
) -> Iterator[Span]:
    now = launch.start
    if launch.device_acquired is not None:
        began = max(launch.device_acquired - launch.device_wait_seconds, now)
        yield Span(Use.STARTUP, now, began)
        yield Span(Use.WAIT, began, launch.device_acquired)
        now = launch.device_acquired
    elif not attempts:
        yield Span(Use.WAIT, now, launch.end)
        return
    for index, attempt in enumerate(attempts):
        yield Span(
            Use.WAIT if index else Use.STARTUP, now, attempt.started, attempt.number
        )
        yield from _of_attempt(attempt, kept[attempt.number])
        now = attempt.ended
    waits = bool(attempts) and attempts[-1].action not in (
        None,
        "none",
        "give_up",
        "stopped",
    )
    yield Span(Use.WAIT if waits else Use.STARTUP, now, launch.end)


def _of_attempt(attempt: TimedAttempt, kept: float) -> Iterator[Span]:
    number, started, ended = attempt.number, attempt.started, attempt.ended
    began, until = attempt.training_began, _kept_until(attempt, kept)
    if attempt.outcome == "completed":
        # all the time of a trainer that never reports its start counts as training
        began, until = started if began is None else began, ended
    if began is None or until is None:
        yield Span(Use.LOST, started, ended, number)
        return
    yield Span(Use.STARTUP, started, began, number)
    yield Span(Use.USEFUL, began, until, number)
    yield Span(Use.LOST, until, ended, number)


def _kept_until(attempt: TimedAttempt, kept: float) -> float | None:
    """Return when the last kept step was done; None if no step was kept."""
    if kept <= attempt.start_step:
        return None
    saved = [time for step, time in attempt.checkpoints if step <= kept]
    done = [time for step, time in attempt.progress if step <= kept]
    return max(saved or done, default=None)
