"""Reads the content of a run folder for the report, and skips damaged parts.

The report and the narration call it, in the launcher at the end of a job, in a sweep, or in a
command. `read_sources` and `read_entries` read files. `launches_of` and `attempts_of`, which fold
a journal into launches and attempts, are pure. A killed run may have left truncated lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from robust_train.files import json_lines
from robust_train.folder.memory_samples import FILE_NAME as SAMPLES_FILE
from robust_train.folder.memory_samples import Sample, read_samples
from robust_train.folder.provenance import read_environment
from robust_train.folder.state import Summary, read_state, read_summary
from robust_train.model.attempt import Attempt, AttemptEnded
from robust_train.model.events import (
    AttemptStarted,
    CheckpointSaved,
    DecidedAgain,
    DeviceAcquired,
    Event,
    JobEnded,
    JobStarted,
    Progress,
    TrainingStarted,
    parse,
)
from robust_train.model.json import Json, MalformedEventError, finite
from robust_train.readable import counted

_MOST_FILES = 40


@dataclass(frozen=True)
class Entry:
    """A line of ``journal.jsonl``. Its ``time`` is never earlier than that of the line before."""

    time: float
    event: Event
    attempt: int = 0  # number of the attempt; 0 if the event belongs to no attempt


@dataclass(frozen=True)
class Sources:
    """Everything that a run folder records about its job, oldest first."""

    folder: Path
    entries: tuple[Entry, ...]
    samples: tuple[Sample, ...]
    summary: Summary | None
    # Seconds that the job took, as its launcher recorded them. None if the job has not ended.
    took: float | None
    environment: Mapping[str, Json]  # `environment.json`
    files: tuple[str, ...]  # names of the files in the folder
    # One sentence for each thing that is missing or damaged.
    gaps: tuple[str, ...]


def read_sources(folder: Path) -> Sources:
    """Read a run folder, in which anything may be missing or damaged."""
    gaps: list[str] = []
    state = read_state(folder)
    took = None
    if state is not None and state.is_final:
        took = state.seconds(state.updated)
    return Sources(
        folder=folder,
        entries=tuple(_entries(folder / "journal.jsonl", gaps)),
        samples=tuple(read_samples(folder / SAMPLES_FILE)),
        summary=read_summary(folder),
        took=took,
        environment=read_environment(folder),
        files=_files(folder),
        gaps=tuple(gaps),
    )


def read_entries(folder: Path) -> tuple[Entry, ...]:
    """Read the journal of a run folder, without damaged lines."""
    return tuple(_entries(folder / "journal.jsonl", []))


def _entries(path: Path, gaps: list[str]) -> Iterator[Entry]:
    """Yield the content of a journal's lines. Unreadable lines are counted in ``gaps``."""
    latest = -math.inf
    skipped = 0
    try:
        for content in json_lines(path) if path.is_file() else ():
            time = finite((content or {}).get("time"))
            try:
                event = parse(content or {})
            except MalformedEventError:
                event = None
            if content is None or event is None or time is None:
                skipped += 1
                continue
            # If the clock was set back, the story must not run backwards.
            latest = max(latest, time)
            attempt = content.get("attempt")
            yield Entry(latest, event, attempt if type(attempt) is int else 0)
    except OSError as error:
        gaps.append(f"{path.name}: {error.strerror or error}")
    if skipped:
        lines = counted(skipped, "line")
        gaps.append(f"{path.name}: {lines} damaged or of an unknown kind")


def _files(folder: Path) -> tuple[str, ...]:
    try:
        names = sorted(item.name for item in folder.iterdir() if item.is_file())
    except OSError:
        return ()
    return tuple(names[:_MOST_FILES])


@dataclass(frozen=True)
class Launch:
    """A launch of the job. Times are seconds since the epoch."""

    start: float
    end: float  # time of the last entry, also if the launcher died or still runs
    status: str | None = None  # None if no end is recorded
    reason: str | None = None
    device_acquired: float | None = None  # when it got its device, None if it never did
    device_wait_seconds: float = 0.0  # how long it waited for the device


@dataclass(frozen=True)
class TimedAttempt(Attempt):
    """An attempt with the times of its reports, in seconds since the epoch."""

    ended: float = 0.0  # time of the last entry if no end is recorded
    # When training began, None if it never did.
    training_began: float | None = None
    # (step, time) of each progress report, and of each useful checkpoint.
    progress: tuple[tuple[int, float], ...] = field(default=(), repr=False)
    checkpoints: tuple[tuple[int, float], ...] = ()

    @property
    def device(self) -> str:
        """The device of the attempt."""
        return self.spec.device

    @property
    def batch_size(self) -> int | None:
        """The micro-batch size, None for a script that does not get one."""
        return self.spec.batch_size if self.spec.has_batch else None


def launches_of(entries: Sequence[Entry]) -> tuple[Launch, ...]:
    """Return the launches in a journal, oldest first."""
    launches: list[Launch] = []
    for entry in entries:
        if isinstance(entry.event, JobStarted) or not launches:
            launches.append(Launch(entry.time, entry.time))
        launch = replace(launches[-1], end=entry.time)
        event = entry.event
        if isinstance(event, JobEnded):
            launch = replace(launch, status=event.status, reason=event.reason)
        elif isinstance(event, DeviceAcquired):
            launch = replace(
                launch, device_acquired=entry.time, device_wait_seconds=max(event.wait_seconds, 0.0)
            )
        launches[-1] = launch
    return tuple(launches)


def attempts_of(entries: Sequence[Entry]) -> tuple[TimedAttempt, ...]:
    """Return the attempts in a journal whose start or end is recorded, oldest first."""
    groups: dict[int, list[Entry]] = {}
    saved = {}
    for entry in entries:
        if entry.attempt:
            groups.setdefault(entry.attempt, []).append(entry)
        if isinstance(entry.event, CheckpointSaved):
            saved[entry.event.path] = entry.event.step or 0
    attempts = [_attempt(number, group, saved) for number, group in groups.items()]
    return tuple(attempt for attempt in attempts if attempt is not None)


def _attempt(
    number: int, entries: Sequence[Entry], saved: Mapping[str, int]
) -> TimedAttempt | None:
    """Fold the entries of one attempt, or return None if neither start nor end is recorded.

    ``saved`` has the step of each checkpoint by its path.
    """
    attempt: Attempt | None = None
    progress: list[tuple[int, float]] = []
    checkpoints: list[tuple[int, float]] = []
    began = None
    ended = entries[-1].time
    for entry in entries:
        event = entry.event
        time = entry.time
        match event:
            case AttemptStarted(resume_checkpoint=path):
                attempt = Attempt(
                    number, event.spec, time, path, start_step=saved.get(path or "", 0)
                )
            case AttemptEnded():
                # After a clock was set back, the times in the record may be wrong.
                begun = attempt or event.record
                ended = time
                attempt = replace(event.record, number=number, started=begun.started)
                # The record lacks this figure.
                attempt = attempt.with_same("stalled_seconds", begun)
            case DecidedAgain() if attempt is not None:
                attempt = replace(attempt, action=event.action, reason=event.reason)
            case _ if attempt is not None and attempt.seconds is None:
                attempt = attempt.after(event)
        match event:
            case Progress():
                progress.append((event.step, time))
                began = began or time
            case CheckpointSaved(step=int(step)) if event.is_useful:
                checkpoints.append((step, time))
            case TrainingStarted():
                began = time
    if attempt is None:
        return None
    return TimedAttempt(
        **vars(attempt),
        ended=ended,
        training_began=began,
        progress=tuple(progress),
        checkpoints=tuple(checkpoints),
    )
