"""Keeps journals and memory samples small: what comes many times a minute becomes sparser as the
job goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robust_train import events
from robust_train.files import replacing

THINNED = frozenset(
    kind.name
    for kind in (
        *(events.CheckpointSaved, events.EpochEnded, events.MemoryCleared, events.MemoryReported),
        *(events.MicroBatchChanged, events.MicroBatchExhausted, events.Progress),
        *(events.RequestDone, events.SpeedMeasured, events.UserEvent),
    )
)
"""Events that become sparser; all others are kept for good."""

_MOST_NAMES = 100


@dataclass(frozen=True)
class Limits:
    """How much is kept of each kind of line: so many spread evenly over the time, so many of the
    newest, and at most so many bytes."""

    between: int = 1000
    newest: int = 300
    bytes: int = 2 * 1024**2


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Line:
    """One line of a file: its number, length in bytes, time and attempt."""

    number: int
    length: int
    time: float
    attempt: int


def kind_of_event(content: Mapping[str, Any]) -> str | None:
    """Return the kind of a journal's line; None for one that is kept for good."""
    name = str(content["event"])
    if name not in THINNED:
        return None
    if name == events.UserEvent.name:
        name = f"user {content['event_name']}"
    return f"{name} {content.get('rank') or ''}"  # every rank's own


def thin(
    path: Path,
    limits: Limits = DEFAULT_LIMITS,
    kind_of: Callable[[Mapping[str, Any]], str | None] = kind_of_event,
) -> None:
    """Remove from a file what is more than ``limits`` allow of a kind, in one step. Raises OSError:
    it cannot be read or written; the file is as it was."""
    surplus: set[int] = set()
    for stream in _streams(path, kind_of).values():
        surplus |= {line.number for line in set(stream).difference(chosen(stream, limits))}
    if not surplus:
        return
    with path.open("rb") as file, replacing(path, durable=True) as temporary:
        with temporary.open("wb") as kept:
            kept.writelines(data for number, data in enumerate(file) if number not in surplus)
        temporary.chmod(path.stat().st_mode)


def _streams(
    path: Path, kind_of: Callable[[Mapping[str, Any]], str | None]
) -> dict[str, list[Line]]:
    """Return the lines that may be removed, by kind."""
    streams: dict[str, list[Line]] = {}
    with path.open("rb") as file:
        for number, data in enumerate(file):
            try:
                content = json.loads(data)
                kind, attempt = kind_of(content), int(content.get("attempt") or 0)
                line = Line(number, len(data), float(content["time"]), attempt)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                continue
            if kind is None:
                continue
            if kind not in streams and len(streams) >= _MOST_NAMES:
                kind = "others"
            streams.setdefault(kind, []).append(line)
    return streams


def chosen(stream: Sequence[Line], limits: Limits) -> list[Line]:
    """Return the lines of one kind that stay: of each attempt the first and the last, the
    newest, and as many as may be in between, spread over the time. Pure."""
    last = {line.attempt: line for line in stream}
    first = {line.attempt: line for line in reversed(stream)}
    ends = {*first.values(), *last.values()}
    middle = [line for line in stream if line not in ends]
    start_of_newest = max(len(middle) - limits.newest, 0)
    older, newest = middle[:start_of_newest], middle[start_of_newest:]
    older = _sparser(older, lambda lines: len(lines) > limits.between)
    left = _sparser(
        [*older, *newest], lambda lines: sum(line.length for line in lines) > limits.bytes
    )
    return sorted([*ends, *left], key=lambda line: line.number)


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
