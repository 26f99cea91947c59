"""What a script reports: lines of JSON in the file that ``ROBUST_TRAIN_EVENTS`` names.

A file, because any language can append to one, also from a process several wrappers below, and
no one is ever blocked by it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from robust_train.files import plain
from robust_train.host.linux import release_blocks
from robust_train.model import events
from robust_train.model.events import parse as parse_event
from robust_train.model.failure import FailureKind

_LARGEST_LINE = 50_000
_ADDED_FIELDS = frozenset({"event", "attempt", "time"})
_OF_A_RUN = frozenset(
    {
        "micro_batch_changed",
        "micro_batch_exhausted",
        "memory",
        "memory_cleared",
        "epoch",
        "speed",
    }
)
"""Events that :func:`robust_train.current_run` sends besides the documented messages."""


class NotUnderstood(ValueError):
    """A line that is no message; the text is the reason."""


@dataclass(frozen=True)
class Result:
    """The job's result."""

    value: events.Json


@dataclass(frozen=True)
class OwnFailure:
    """Why the script is about to fail."""

    kind: FailureKind
    message: str


def parse(line: str) -> events.Event | Result | OwnFailure:
    """Return what one line reports; what has no other meaning is an event of the script's own.
    Raises NotUnderstood: it is no message."""
    if len(line) > _LARGEST_LINE:
        raise NotUnderstood(f"longer than {_LARGEST_LINE} characters")
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NotUnderstood(f"not JSON: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("event"), str):
        raise NotUnderstood('not an object with a name under "event"')
    name = data["event"]
    fields = {
        key: plain(value) for key, value in data.items() if key not in _ADDED_FIELDS
    }
    if name == "progress":
        total = (
            _count(fields, "total_steps", name) if fields.get("total_steps") else None
        )
        return events.Progress(_count(fields, "step", name), total, _metrics(fields))
    if name in ("started", "training_started"):
        return events.TrainingStarted(_count(fields, "step", name))
    if name == "checkpoint":
        path, step = fields.get("path"), fields.get("step")
        if not (isinstance(path, str) and path):
            raise NotUnderstood("checkpoint needs path, a string")
        return events.CheckpointSaved(path, step if type(step) is int else None)
    if name == "result":
        if "value" not in fields:
            raise NotUnderstood("result needs value")
        return Result(fields["value"])
    if name == "failed":
        kinds = [kind.value for kind in FailureKind]
        if fields.get("kind") not in kinds:
            raise NotUnderstood(f"failed needs kind, one of {', '.join(kinds)}")
        message = str(fields.get("message", "reported by the script"))
        return OwnFailure(FailureKind(fields["kind"]), message)
    if name in _OF_A_RUN:
        with contextlib.suppress(events.MalformedEvent):
            return parse_event({"event": name, **fields})
    if name == "user" and isinstance(fields.get("event_name"), str):
        own = fields.get("fields")
        return events.UserEvent(
            fields["event_name"], own if isinstance(own, dict) else {}
        )
    return events.UserEvent(name, fields)


def _metrics(fields: Mapping[str, events.Json]) -> dict[str, float]:
    nested = fields.get("metrics")
    given = {**fields, **(nested if isinstance(nested, Mapping) else {})}
    return {
        key: value
        for key, value in given.items()
        if key not in ("step", "total_steps") and isinstance(value, (int, float))
    }


def _count(fields: Mapping[str, events.Json], key: str, event: str) -> int:
    value = fields.get(key)
    if type(value) is not int or value < 0:
        raise NotUnderstood(f"{event}: {key} must be an integer of 0 or more")
    return value


class LineReader:
    """Whole lines as they are appended to a file, in bounded memory and room on the disk."""

    def __init__(self, path: Path, *, block_bytes: int = 1 << 20) -> None:
        self._path = path
        self._block = block_bytes
        self._offset = self._released = 0
        self._rest = b""

    def read(self, *, to_the_end: bool = False) -> Iterator[str]:
        """Yield the lines since the last call, of one that is too long only a part; ``to_the_end``:
        a torn last one included."""
        self._release()
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            size = os.fstat(
                file.fileno()
            ).st_size  # no end is in sight where a script is faster
            file.seek(self._offset)
            while data := file.read(min(self._block, max(size - self._offset, 0))):
                self._offset += len(data)
                *lines, rest = (self._rest + data).split(b"\n")
                self._rest = rest[: 4 * _LARGEST_LINE + 1]
                yield from _texts(lines)
        if to_the_end:
            yield from _texts([self._rest])
            self._rest = b""

    def _release(self) -> None:
        """Keep one block of what was passed on: some of it may still be on its way."""
        old = self._offset - self._block
        if old - self._released >= self._block:
            release_blocks(self._path, self._released, old - self._released)
            self._released = old


def _texts(lines: Iterable[bytes]) -> Iterator[str]:
    return (text for line in lines if (text := line.decode(errors="replace").strip()))
