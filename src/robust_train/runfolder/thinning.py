"""Keeps a journal small: what comes many times a minute becomes sparser as the job goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from robust_train.events import (
    CheckpointSaved,
    EpochEnded,
    MemoryCleared,
    MemoryReported,
    MicroBatchChanged,
    MicroBatchExhausted,
    Progress,
    RequestDone,
    UserEvent,
)
from robust_train.files import replacing

_MANY = frozenset(
    kind.name
    for kind in (
        *(CheckpointSaved, EpochEnded, MemoryCleared, MemoryReported, MicroBatchChanged),
        *(MicroBatchExhausted, Progress, RequestDone, UserEvent),
    )
)
_MOST_NAMES = 100


@dataclass(frozen=True)
class Limits:
    """How much is kept of each kind of event.

    Attributes:
        between: events spread evenly over the time.
        newest: all of them.
        bytes: of one kind's events; large ones become sparser.
    """

    between: int = 1000
    newest: int = 300
    bytes: int = 2 * 1024**2


@dataclass(frozen=True)
class Line:
    """One line of a journal: where it begins, its length, time and attempt."""

    start: int
    length: int
    time: float
    attempt: int


def is_thinned(name: str) -> bool:
    """Return whether events called ``name`` become sparser; all others are kept for good."""
    return name in _MANY


def thin(path: Path, limits: Limits | None = None) -> None:
    """Remove from a journal what is more than ``limits`` allow, in one step.

    Raises:
        OSError: it cannot be read or written; the journal is as it was.
    """
    dropped = _surplus(path, limits or Limits())
    if not dropped:
        return
    with path.open("rb") as file, replacing(path, durable=True) as temporary:
        with temporary.open("wb") as kept:
            start = 0
            for line in file:
                if start not in dropped:
                    kept.write(line)
                start += len(line)
        temporary.chmod(path.stat().st_mode)


def _surplus(path: Path, limits: Limits) -> set[int]:
    """Return where the lines begin that are too many."""
    streams: dict[str, list[Line]] = {}
    start = 0
    with path.open("rb") as file:
        for data in file:
            line = _as_line(data, start)
            if line is not None:
                key = line[0]
                if key not in streams and len(streams) >= _MOST_NAMES:
                    key = "others"
                streams.setdefault(key, []).append(line[1])
            start += len(data)
    return {
        line.start
        for stream in streams.values()
        for line in set(stream).difference(chosen(stream, limits))
    }


def _as_line(data: bytes, start: int) -> tuple[str, Line] | None:
    """Return the kind of event and where it stands; None for what is never removed."""
    try:
        content = json.loads(data)
        name = content["event"]
        if name not in _MANY:
            return None
        if name == UserEvent.name:
            name = f"user {content['event_name']}"
        # every rank's own
        key = f"{name} {content.get('rank') or ''}"
        return key, Line(start, len(data), float(content["time"]), int(content.get("attempt") or 0))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def chosen(stream: Sequence[Line], limits: Limits) -> list[Line]:
    """Return the lines of one kind of event that stay: of each attempt the first and the last, the
    newest, and as many as may be in between, spread over the time. Pure."""
    ends = {line.start: line for line in _firsts(stream) + _firsts(stream[::-1])}
    middle = [line for line in stream if line.start not in ends]
    newest = middle[len(middle) - limits.newest :] if len(middle) > limits.newest else middle
    older = middle[: len(middle) - len(newest)]
    older = _sparser(older, lambda lines: len(lines) > limits.between)
    left = [*older, *newest]
    left = _sparser(left, lambda lines: sum(line.length for line in lines) > limits.bytes)
    return sorted([*ends.values(), *left], key=lambda line: line.start)


def _firsts(lines: Sequence[Line]) -> list[Line]:
    found: dict[int, Line] = {}
    for line in lines:
        found.setdefault(line.attempt, line)
    return list(found.values())


def _sparser(lines: list[Line], are_too_many: Callable[[list[Line]], bool]) -> list[Line]:
    """Return lines that are ever further apart in time, until they are few enough."""
    spacing = 0.0
    while len(lines) > 1 and are_too_many(lines):
        spacing = max(2 * spacing, 1.5 * (lines[-1].time - lines[0].time) / len(lines))
        apart: list[Line] = []
        for line in lines:
            # a clock that was set back must not end the record
            if not apart or not 0 <= line.time - apart[-1].time < spacing:
                apart.append(line)
        lines = apart if len(apart) < len(lines) else lines[::2]
    return lines
