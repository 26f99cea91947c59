"""The content of a run folder, as far as it can be read: a killed run leaves torn lines.

:func:`read_sources` reads; what folds a journal into launches and attempts is pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from robust_train.files import json_lines
from robust_train.folder.memory_samples import FILE_NAME as SAMPLES_FILE
from robust_train.folder.memory_samples import Sample
from robust_train.folder.provenance import read_environment
from robust_train.folder.state import Summary, read_summary
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
    Stalled,
    TrainingStarted,
    parse,
)
from robust_train.model.json import Json, MalformedEvent, finite, from_json

_MOST_FILES = 40


@dataclass(frozen=True)
class Entry:
    """One line of ``journal.jsonl``; ``time`` is never before that of the line above it."""

    time: float
    event: Event
    attempt: int | None = None


Timed = TypeVar("Timed", Entry, Sample)


@dataclass(frozen=True)
class Sources:
    """All that a run folder records about its job, oldest first."""

    folder: Path
    entries: tuple[Entry, ...] = ()
    samples: tuple[Sample, ...] = ()
    summary: Summary | None = None
    environment: Mapping[str, Json] = field(default_factory=dict)  # `environment.json`
    files: tuple[str, ...] = ()  # names of the other files in the folder
    gaps: tuple[str, ...] = ()  # one sentence for each thing that is missing or damaged


def read_sources(folder: Path) -> Sources:
    """Read a run folder, in which anything may be missing or damaged."""
    gaps: list[str] = []
    samples = folder / SAMPLES_FILE
    return Sources(
        folder=folder,
        entries=tuple(
            _in_order(
                folder / "journal.jsonl",
                _entry,
                gaps,
            )
        ),
        samples=tuple(_in_order(samples, _sample, gaps) if samples.exists() else ()),
        summary=read_summary(folder),
        environment=read_environment(folder),
        files=_files(folder),
        gaps=tuple(gaps),
    )


def _entry(content: Mapping[str, Json]) -> Entry:
    time, attempt = finite(content.get("time")), content.get("attempt")
    if time is None:
        raise MalformedEvent("no time")
    return Entry(
        time,
        parse(content),
        attempt if type(attempt) is int else None,
    )


def _sample(content: Mapping[str, Json]) -> Sample:
    return from_json(Sample, content)


def _in_order(
    path: Path,
    read: Callable[[Mapping[str, Json]], Timed],
    gaps: list[str],
) -> Iterator[Timed]:
    """Yield what the lines of a file hold; what cannot be read is counted in ``gaps``."""
    latest = -math.inf
    skipped = {"damaged line": 0, "line of an unknown kind": 0}
    if path.exists() and not path.is_file():
        gaps.append(f"{path.name}: not a regular file")
        return
    try:
        for content in json_lines(path):
            if content is None:
                skipped["damaged line"] += 1
                continue
            try:
                one = read(content)
            except MalformedEvent:
                skipped["line of an unknown kind"] += 1
                continue
            # a clock that was set back must not reverse the story
            latest = max(latest, one.time)
            yield replace(one, time=latest)
    except OSError as error:
        gaps.append(f"{path.name}: {error.strerror or error}")
    for kind, count in skipped.items():
        if count:
            what = kind if count == 1 else kind.replace("line", "lines")
            gaps.append(f"{path.name}: {count} {what} skipped")


def _files(folder: Path) -> tuple[str, ...]:
    try:
        names = sorted(item.name for item in folder.iterdir() if item.is_file())
    except OSError:
        return ()
    shown = [n for n in names if n != "report.html" and not n.endswith(".tmp")]
    return tuple(shown[:_MOST_FILES])


@dataclass(frozen=True)
class Launch:
    """One launch of the job; times are seconds since the epoch."""

    start: float
    end: float  # that of the last entry if the launcher died or still runs
    status: str | None = None  # None without a recorded end
    reason: str | None = None
    device_acquired: float | None = None  # when it had a device, None if never
    device_wait_seconds: float = 0.0  # of the time before, waiting for one


@dataclass(frozen=True)
class TimedAttempt(Attempt):
    """An attempt with the times of what it reported, in seconds since the epoch."""

    ended: float = 0.0  # time of the last entry if no end is recorded
    training_began: float | None = None  # when the first step did, None if never
    # (step, time) of each
    progress: tuple[tuple[int, float], ...] = field(default=(), repr=False)
    checkpoints: tuple[tuple[int, float], ...] = ()
    stalled_seconds: float = 0.0  # it stood still before it was ended for that

    @property
    def device(self) -> str:
        """Its device."""
        return self.spec.device

    @property
    def batch_size(self) -> int | None:
        """Its micro-batch size, None if it is a script that is given none."""
        return self.spec.batch_size if self.spec.has_batch else None

    def as_json(self) -> dict[str, Json]:
        """Return the record with the times."""
        return {
            **super().as_json(),
            "seconds": round(self.ended - self.started, 3),
        }


def launches_of(entries: Sequence[Entry]) -> tuple[Launch, ...]:
    """Return the launches in a journal, oldest first."""
    launches: list[Launch] = []
    for entry in entries:
        if isinstance(entry.event, JobStarted) or not launches:
            launches.append(Launch(entry.time, entry.time))
        launch, event = replace(launches[-1], end=entry.time), entry.event
        if isinstance(event, JobEnded):
            launch = replace(
                launch,
                status=event.status,
                reason=event.reason,
            )
        elif isinstance(event, DeviceAcquired):
            launch = replace(
                launch,
                device_acquired=entry.time,
                device_wait_seconds=max(event.wait_seconds, 0.0),
            )
        launches[-1] = launch
    return tuple(launches)


def attempts_of(entries: Sequence[Entry]) -> tuple[TimedAttempt, ...]:
    """Return the attempts in a journal whose start or end is recorded, oldest first."""
    own: dict[int, list[Entry]] = {}
    saved = {}
    for entry in entries:
        if entry.attempt is not None:
            own.setdefault(entry.attempt, []).append(entry)
        if isinstance(entry.event, CheckpointSaved):
            saved[entry.event.path] = entry.event.step or 0
    found = [_attempt(number, group, saved) for number, group in own.items()]
    known = [attempt for attempt in found if attempt is not None]
    return tuple(sorted(known, key=lambda attempt: (attempt.started, attempt.number)))


def _attempt(
    number: int,
    entries: Sequence[Entry],
    saved: Mapping[str, int],
) -> TimedAttempt | None:
    attempt: Attempt | None = None
    progress: list[tuple[int, float]] = []
    checkpoints: list[tuple[int, float]] = []
    began, ended, stalled = None, entries[-1].time, 0.0
    for entry in entries:
        event, time = entry.event, entry.time
        match event:
            case AttemptStarted():
                path = event.resume_checkpoint
                start_step = saved.get(path or "", 0)
                attempt = Attempt(
                    number,
                    event.spec,
                    time,
                    path,
                    start_step=start_step,
                )
                continue
            case AttemptEnded():
                attempt, ended = replace(event.record, number=number), time
                continue
            case Progress():
                progress.append((event.step, time))
            case CheckpointSaved(step=int(step)) if event.loss != "diverged":
                checkpoints.append((step, time))
            case TrainingStarted():
                began = time
            case Stalled():
                stalled = event.seconds
        if attempt is not None and isinstance(event, DecidedAgain):
            attempt = replace(
                attempt,
                action=event.action,
                reason=event.reason,
            )
        elif attempt is not None and attempt.seconds is None:
            attempt = attempt.after(event)
    if attempt is None:
        return None
    return TimedAttempt(
        **vars(attempt),
        ended=ended,
        training_began=progress[0][1] if began is None and progress else began,
        progress=tuple(progress),
        checkpoints=tuple(checkpoints),
        stalled_seconds=stalled,
    )
