"""Where the time of a job went: useful, lost, waiting, starting up. All of it is pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from robust_train.report.attempts import AttemptStory, Launch


class Use(str, Enum):
    """What a stretch of a job's time was.

    ``docs/report.md`` has the definitions for people; they are these:

    * useful: from an attempt's first step to the last one that what came later was built on.
    * lost: steps that were done again or are saved nowhere, and attempts that left nothing.
    * wait: no attempt ran, for want of a device or of room, or in a pause before a retry.
    * startup: from an attempt's start to its first step, and the launcher's own work.
    * stopped: between two launches in the same run folder; no part of the wall time.
    """

    USEFUL = "useful"
    LOST = "lost"
    WAIT = "wait"
    STARTUP = "startup"
    STOPPED = "stopped"


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
    launches: Sequence[Launch], attempts: Sequence[AttemptStory], *, completed: bool
) -> tuple[Span, ...]:
    """Cut all of a job's time into its uses, without gaps or overlaps, oldest first.

    Args:
        launches: of the run folder, oldest first.
        attempts: of all launches, oldest first.
        completed: the job did; else only what the last checkpoint holds was useful.
    """
    kept = kept_steps(attempts, completed=completed)
    starts = [launch.start for launch in launches]
    spans: list[Span] = []
    for index, launch in enumerate(launches):
        if spans and launch.start > spans[-1].end:
            spans.append(Span(Use.STOPPED, spans[-1].end, launch.start))
        own = [a for a in attempts if bisect_right(starts, a.started) == index + 1]
        spans += _of_launch(launch, own, kept)
    return tuple(_one_after_another(spans))


def _one_after_another(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield spans without overlaps, also where a journal has two attempts at the same time."""
    now = -math.inf
    for span in spans:
        start = max(span.start, now)
        if span.end > start:
            yield Span(span.use, start, span.end, span.attempt)
            now = span.end


def totals(spans: Sequence[Span]) -> dict[Use, float]:
    """Return the seconds of each use."""
    return {use: sum(span.seconds for span in spans if span.use is use) for use in Use}


def kept_steps(attempts: Sequence[AttemptStory], *, completed: bool) -> dict[int, float]:
    """Return the last step that was not done again, by number of the attempt.

    A later attempt that began further back undoes what lies after its beginning; at the end of a
    job that did not complete, so does the want of a checkpoint.
    """
    kept: dict[int, float] = {}
    bound = math.inf
    if not completed:
        bound = max((step for a in attempts for step, _ in a.checkpoints), default=0)
    for attempt in reversed(attempts):
        kept[attempt.number] = math.inf if attempt.outcome == "completed" else bound
        bound = min(bound, attempt.start_step)
    return kept


def _of_launch(
    launch: Launch, attempts: Sequence[AttemptStory], kept: dict[int, float]
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
        yield Span(Use.WAIT if index else Use.STARTUP, now, attempt.started, attempt.number)
        yield from _of_attempt(attempt, kept[attempt.number])
        now = attempt.ended
    waits = bool(attempts) and attempts[-1].action not in (None, "none", "give_up", "stopped")
    yield Span(Use.WAIT if waits else Use.STARTUP, now, launch.end)


def _of_attempt(attempt: AttemptStory, kept: float) -> Iterator[Span]:
    number, started, ended = attempt.number, attempt.started, attempt.ended
    if attempt.outcome == "completed":
        # all the time of a trainer that never reports its start counts as training
        began = started if attempt.training_began is None else attempt.training_began
        yield Span(Use.STARTUP, started, began, number)
        yield Span(Use.USEFUL, began, ended, number)
        return
    until = _reached(attempt, kept)
    if until is None or attempt.training_began is None:
        yield Span(Use.LOST, started, ended, number)
        return
    yield Span(Use.STARTUP, started, attempt.training_began, number)
    yield Span(Use.USEFUL, attempt.training_began, until, number)
    yield Span(Use.LOST, until, ended, number)


def _reached(attempt: AttemptStory, kept: float) -> float | None:
    """Return when the last step that was kept was done; None where none was."""
    if kept <= attempt.start_step:
        return None
    saved = [time for step, time in attempt.checkpoints if step <= kept]
    if saved:
        return saved[-1]
    done = [time for step, time in attempt.progress if step <= kept]
    return done[-1] if done else None
