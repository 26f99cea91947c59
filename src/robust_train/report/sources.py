"""The content of a run folder, as far as it can be read: a killed run leaves torn lines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from robust_train.files import Json, finite, json_lines
from robust_train.folder.provenance import read_environment
from robust_train.folder.summary import Summary, read_summary
from robust_train.memory.samples import FILE_NAME as SAMPLES_FILE
from robust_train.memory.samples import Sample
from robust_train.model.events import Event, MalformedEvent, from_json, parse

_MOST_FILES = 40


@dataclass(frozen=True)
class Entry:
    """One line of ``journal.jsonl``; ``time`` is never before that of the line above it."""

    time: float
    event: Event
    attempt: int | None = None


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
    return Sources(
        folder=folder,
        entries=tuple(read_entries(folder / "journal.jsonl", gaps)),
        samples=tuple(_samples(folder / SAMPLES_FILE, gaps)),
        summary=read_summary(folder),
        environment=read_environment(folder),
        files=_files(folder),
        gaps=tuple(gaps),
    )


def read_entries(path: Path, gaps: list[str]) -> Iterator[Entry]:
    """Yield the entries of a journal. Unknown ones are counted in ``gaps``."""
    latest, unknown = -math.inf, 0
    for content in _objects(path, gaps):
        time, attempt = finite(content.get("time")), content.get("attempt")
        try:
            event = parse(content)
        except MalformedEvent:
            event = None
        if event is None or time is None:
            unknown += 1
            continue
        latest = max(
            latest, time
        )  # a clock that was set back must not reverse the story
        yield Entry(latest, event, attempt if type(attempt) is int else None)
    if unknown:
        gaps.append(f"{path.name}: {_lines(unknown)} of an unknown kind skipped")


def _samples(path: Path, gaps: list[str]) -> Iterator[Sample]:
    latest = -math.inf
    for content in _objects(path, gaps) if path.exists() else ():
        try:
            sample = from_json(Sample, content)
        except MalformedEvent:
            continue
        latest = max(latest, sample.time)
        yield replace(sample, time=latest)


def _objects(path: Path, gaps: list[str]) -> Iterator[Mapping[str, Json]]:
    """Yield the JSON objects of a file, one a line."""
    damaged = 0
    if path.exists() and not path.is_file():
        gaps.append(f"{path.name}: not a regular file")
        return
    try:
        for content in json_lines(path):
            damaged += content is None
            if content is not None:
                yield content
    except OSError as error:
        gaps.append(f"{path.name}: {error.strerror or error}")
    if damaged:
        gaps.append(f"{path.name}: {_lines(damaged, 'damaged ')} skipped")


def _lines(count: int, kind: str = "") -> str:
    return f"{count} {kind}line{'s' * (count > 1)}"


def _files(folder: Path) -> tuple[str, ...]:
    try:
        names = sorted(item.name for item in folder.iterdir() if item.is_file())
    except OSError:
        return ()
    shown = [
        name for name in names if name != "report.html" and not name.endswith(".tmp")
    ]
    return tuple(shown[:_MOST_FILES])
