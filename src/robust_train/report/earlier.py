"""What the earlier launches of a job did, for the screen at its end. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from robust_train.readable import by_processes, shortened
from robust_train.report.attempts import AttemptStory, attempts_of, launches_of
from robust_train.report.sources import Entry
from robust_train.runfolder.journal import JobStarted

_MOST_ROWS = 20


@dataclass(frozen=True)
class EarlierLaunches:
    """Their time in seconds, and their last attempts as rows of the table of attempts."""

    seconds: float = 0.0
    rows: tuple[tuple[str, ...], ...] = ()


def earlier_launches(entries: Sequence[Entry]) -> EarlierLaunches:
    """Return what a journal has of the launches of the last job before the last one."""
    starts = [n for n, entry in enumerate(entries) if isinstance(entry.event, JobStarted)]
    jobs = [getattr(entries[n].event, "job", "") for n in starts]
    own = [n for n, job in zip(starts, jobs, strict=True) if job == jobs[-1]]
    before = entries[own[0] : own[-1]] if own else ()
    seconds = math.fsum(launch.end - launch.start for launch in launches_of(before))
    return EarlierLaunches(seconds, tuple(map(_row, attempts_of(before)[-_MOST_ROWS:])))


def _row(story: AttemptStory) -> tuple[str, ...]:
    sizes = (story.batch_size, story.gradient_accumulation_steps, story.effective_batch_size)
    steps = f"{story.start_step}-{'?' if story.end_step is None else story.end_step}"
    ending = story.outcome
    if story.outcome == "interrupted":
        ending = "stopped" if story.action == "stopped" else shortened(story.message or ending, 60)
    return (
        str(story.number),
        story.device + by_processes(story.ranks),
        *("-" if size is None else str(size) for size in sizes),
        "-" if story.end_step is None and not story.start_step else steps,
        f"{story.seconds:.1f} s",
        "" if story.action in (None, "none") else str(story.action),
        ending,
    )
