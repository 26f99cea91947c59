"""What a run folder holds, read as far as it can be: a run that died leaves torn lines and gaps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from robust_train.memory.samples import FILE_NAME as SAMPLES_FILE
from robust_train.memory.samples import Sample

_LARGEST = 2.0**63
_FIGURES = tuple(item.name for item in fields(Sample) if item.name not in ("time", "device"))
_MOST_FILES = 40


@dataclass(frozen=True)
class Event:
    """One line of ``journal.jsonl``.

    Attributes:
        time: seconds since the epoch; never before that of the line above it.
        name: what happened.
        fields: the rest, in JSON's types; whoever wrote the file may have put in anything.
    """

    time: float
    name: str
    fields: Mapping[str, Any]

    def number(self, key: str) -> float | None:
        """A finite number, None where there is none under ``key``."""
        return finite(self.fields.get(key))

    def whole(self, key: str) -> int | None:
        """A number without its fraction."""
        return whole(self.fields.get(key))

    def text(self, key: str) -> str | None:
        """A text, None where there is none or an empty one."""
        value = self.fields.get(key)
        return value if isinstance(value, str) and value else None


@dataclass(frozen=True)
class Sources:
    """All that a run folder tells of its job.

    Attributes:
        folder: the run folder.
        events: of the journal, oldest first.
        samples: memory over time, oldest first.
        summary: ``summary.json``, empty where there is none that can be read.
        files: names of what lies in the folder beside the report.
        gaps: one sentence for each thing that is missing or damaged.
    """

    folder: Path
    events: tuple[Event, ...] = ()
    samples: tuple[Sample, ...] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()


def finite(value: Any) -> float | None:
    """``value`` if it is a number that can be drawn, else None; true and false are none."""
    kind = type(value)
    # a comparison with no number is false
    if (kind is int or kind is float) and -_LARGEST < value < _LARGEST:
        return float(value)
    return None


def whole(value: Any) -> int | None:
    """``value`` as a whole number, None where it is no number."""
    if type(value) is int and -_LARGEST < value < _LARGEST:
        return value
    number = finite(value)
    return None if number is None else int(number)


def read_sources(folder: Path) -> Sources:
    """Read a run folder. Nothing in it need be there or be whole.

    Args:
        folder: the run folder.
    """
    gaps: list[str] = []
    events = tuple(_events(folder / "journal.jsonl", gaps))
    return Sources(
        folder=folder,
        events=events,
        samples=tuple(_samples(folder / SAMPLES_FILE, gaps)),
        summary=_summary(folder / "summary.json"),
        files=_files(folder),
        gaps=tuple(gaps),
    )


def _events(path: Path, gaps: list[str]) -> Iterator[Event]:
    latest = -math.inf
    for content in _objects(path, gaps):
        name, time = content.pop("event", None), finite(content.pop("time", None))
        if isinstance(name, str) and time is not None:
            # a clock that was set back must not turn the story round
            latest = max(latest, time)
            for key in ("metrics", "record", "fields"):
                nested = content.pop(key, None)
                content |= nested if isinstance(nested, dict) else {}
            name = {"user": content.get("event_name"), "decided_again": content.get("why")}.get(
                name, name
            )
            yield Event(latest, str(name), content)


def _samples(path: Path, gaps: list[str]) -> Iterator[Sample]:
    latest = -math.inf
    for content in _objects(path, gaps if path.exists() else []):
        time, device = finite(content.get("time")), content.get("device")
        figures = {name: whole(content.get(name)) for name in _FIGURES}
        attempt = figures.pop("attempt")
        if time is None or attempt is None or not isinstance(device, str):
            continue
        latest = max(latest, time)
        yield Sample(latest, attempt, device, **figures)


def _objects(path: Path, gaps: list[str]) -> Iterator[dict[str, Any]]:
    damaged = 0
    if path.exists() and not path.is_file():
        # a device or a pipe may have no end
        gaps.append(f"{path.name}: is no regular file")
        return
    try:
        # in bytes: only b"\n" ends a line there, and texts may hold other separators
        with path.open("rb") as file:
            for line in file:
                try:
                    content = json.loads(line.decode("utf-8", "replace"))
                except (ValueError, RecursionError):
                    damaged += bool(line.strip())
                    continue
                if isinstance(content, dict):
                    yield content
    except OSError as error:
        gaps.append(f"{path.name}: {error.strerror or error}")
    if damaged:
        gaps.append(f"{path.name}: {damaged} damaged line{'s' * (damaged > 1)} passed over")


def _summary(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _files(folder: Path) -> tuple[str, ...]:
    try:
        names = sorted(item.name for item in folder.iterdir() if item.is_file())
    except OSError:
        return ()
    shown = [name for name in names if name != "report.html" and not name.endswith(".tmp")]
    return tuple(shown[:_MOST_FILES])
