"""Reads the content of a run folder for the report, and skips damaged parts.

The report and the narration use it, in the launcher at the end of a job, in a sweep, or in a
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

_MOST_FILES = 40  # that the report lists


@dataclass(frozen=True)
class Entry:
    """A line of ``journal.jsonl``."""

    time: float  # never less than the time of the line before
    event: Event
    attempt: int = 0  # the attempt's number, 0 if the event belongs to no attempt


@dataclass(frozen=True)
class Sources:
    """Everything that a run folder records about its job, in order, the oldest first."""

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
    """Read a run folder, in which any file may be missing or damaged."""
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
            # If the clock was set back, the order of the lines counts.
            latest = max(latest, time)
            attempt = content.get("attempt")
            yield Entry(latest, event, attempt if type(attempt) is int else 0)
    except OSError as error:
        gaps.append(f"{path.name}: {error.strerror or error}")
    if skipped:
        lines = counted(skipped, "line")
        gaps.append(f"{path.name}: {lines} damaged or of an unknown kind")


def _files(folder: Path) -> tuple[str, ...]:
    """Return the names of the files in a folder."""
    try:
        names = sorted(item.name for item in folder.iterdir() if item.is_file())
    except OSError:
        return ()
    return tuple(names[:_MOST_FILES])


@dataclass(frozen=True)
class Launch:
    """A launch of the job. Times are in seconds since the epoch."""

    start: float
    end: float  # the time of the last entry if the launcher died or still runs
    status: str | None = None  # None without a recorded end
    reason: str | None = None
    device_acquired: float | None = None  # when the job got its first device
    device_wait_seconds: float = 0.0  # how long it waited for that device


@dataclass(frozen=True)
class TimedAttempt(Attempt):
    """An attempt with the times of its events, in seconds since the epoch."""

    ended: float = 0.0  # the time of the last entry if no end is recorded
    training_began: float | None = None  # when training started, None if it never did
    # The step and the time of each progress report, and of each checkpoint.
    progress: tuple[tuple[int, float], ...] = field(default=(), repr=False)
    checkpoints: tuple[tuple[int, float], ...] = ()

    @property
    def device(self) -> str:
        """The device of the attempt."""
        return self.spec.device

    @property
    def batch_size(self) -> int | None:
        """The micro-batch size, None for a script that does not take it from us."""
        return self.spec.batch_size if self.spec.has_batch else None


def launches_of(entries: Sequence[Entry]) -> tuple[Launch, ...]:
    """Return the launches in a journal, the oldest first."""
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
    """Return the attempts in a journal whose start or end is recorded, the oldest first."""
    groups: dict[int, list[Entry]] = {}
    steps_of_checkpoints = {}
    for entry in entries:
        if entry.attempt:
            groups.setdefault(entry.attempt, []).append(entry)
        if isinstance(entry.event, CheckpointSaved):
            steps_of_checkpoints[entry.event.path] = entry.event.step or 0
    attempts = [
        _build_attempt(number, group, steps_of_checkpoints) for number, group in groups.items()
    ]
    return tuple(attempt for attempt in attempts if attempt is not None)


def _build_attempt(
    number: int, entries: Sequence[Entry], steps_of_checkpoints: Mapping[str, int]
) -> TimedAttempt | None:
    """Return an attempt from its entries, or None if neither its start nor its end is recorded."""
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
                start_step = steps_of_checkpoints.get(path or "", 0)
                attempt = Attempt(number, event.spec, time, path, start_step=start_step)
            case AttemptEnded():
                # If the clock was set back, the record's start is wrong. The record never has
                # `stalled_seconds`.
                so_far = attempt or event.record
                ended = time
                attempt = replace(event.record, number=number, started=so_far.started)
                attempt = attempt.with_same("stalled_seconds", so_far)
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
