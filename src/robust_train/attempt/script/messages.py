"""Reads a script's messages: lines of JSON in the file that ``ROBUST_TRAIN_EVENTS`` names.

:class:`.watched.WatchedScript` uses it in the attempt's process. A Python script writes messages
with :mod:`.script_run`, and a script in another language appends lines such as ``{"event":
"progress", "step": 10, "loss": 0.5}``. A file has two advantages: any language can append to it,
however many wrappers start the script, and it never blocks the script.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from robust_train.files import to_plain
from robust_train.host.linux import release_blocks
from robust_train.model import events

_LARGEST_LINE = 50_000
# Fields of an event in the journal that the launcher adds.
_ADDED_FIELDS = frozenset({"event", "attempt", "time"})
_DOCUMENTED = {
    "progress": "progress",
    "started": "training_started",
    "training_started": "training_started",
    "checkpoint": "checkpoint",
    "report": "report",
}
"""The documented messages, each with the name of its event."""
_OF_SCRIPT_RUN = frozenset(
    {
        "micro_batch_changed",
        "micro_batch_exhausted",
        "split_checked",
        "memory",
        "memory_cleared",
        "epoch",
        "speed",
        "trainer_supports",
    }
)
"""Events that :class:`.script_run.ScriptRun` sends in addition to the documented messages."""


class NotUnderstoodError(ValueError):
    """A line is not a message. The text is the reason."""


@dataclass(frozen=True)
class Result:
    """The message with the job's result."""

    value: events.Json


def parse(line: str) -> events.Event | Result:
    """Return the event or the result in one line. A message with an unknown name is a
    :class:`.UserEvent`.

    Raises:
        NotUnderstoodError: the line is not a message.
    """
    if len(line) > _LARGEST_LINE:
        raise NotUnderstoodError(f"longer than {_LARGEST_LINE} characters")
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NotUnderstoodError(f"not JSON: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("event"), str):
        raise NotUnderstoodError('not an object with a name under "event"')
    name = data["event"]
    fields = {key: to_plain(value) for key, value in data.items() if key not in _ADDED_FIELDS}
    if name in _DOCUMENTED:
        return _parse_documented(name, fields)
    if name == "result":
        if "value" not in fields:
            raise NotUnderstoodError("result needs value")
        return Result(fields["value"])
    if name in _OF_SCRIPT_RUN:
        with contextlib.suppress(events.MalformedEventError):
            return events.parse({"event": name, **fields})
    if name == "user" and isinstance(fields.get("event_name"), str):
        name = fields["event_name"]
        inner = fields.get("fields")
        fields = inner if isinstance(inner, dict) else {}
    return events.UserEvent(name, fields)


def _parse_documented(name: str, fields: dict[str, events.Json]) -> events.Event:
    """Return the event of a documented message."""
    step = fields.get("step")
    if isinstance(step, int) and step < 0:
        raise NotUnderstoodError(f"{name}: step must be an integer of 0 or more")
    if name == "progress":
        figures = dict(fields)
        nested = fields.get("metrics")
        if isinstance(nested, dict):
            figures |= nested
        fields["total_steps"] = fields.get("total_steps") or None
        fields["metrics"] = {
            key: value
            for key, value in figures.items()
            if key not in ("step", "total_steps") and isinstance(value, (int, float))
        }
    elif name == "checkpoint":
        if type(step) is not int:
            step = None
        fields = {"path": fields.get("path") or None, "step": step}
    try:
        return events.parse({**fields, "event": _DOCUMENTED[name]})
    except events.MalformedEventError as error:
        raise NotUnderstoodError(f"{name}: {error}") from None


class LineReader:
    """Reads lines that a script appends to a file, in bounded memory and disk space.

    Disk blocks are released once their lines have been read.
    """

    def __init__(self, path: Path, *, block_bytes: int = 1 << 20) -> None:
        self._path = path
        self._block = block_bytes
        self._offset = 0
        self._released = 0  # up to this offset, the file has no blocks on the disk
        self._rest = b""  # an incomplete last line

    def read(self, *, to_the_end: bool = False) -> Iterator[str]:
        """Yield the lines since the last call. A line that is too long is cut. ``to_the_end``
        includes an incomplete last line."""
        # The last block is kept, because the lines in it may not be processed yet.
        releasable = self._offset - self._block - self._released
        if releasable >= self._block:
            release_blocks(self._path, self._released, releasable)
            self._released += releasable
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            # Read up to this size only: a script that writes faster would keep this loop busy.
            size = os.fstat(file.fileno()).st_size
            file.seek(self._offset)
            while data := file.read(min(self._block, max(size - self._offset, 0))):
                self._offset += len(data)
                *lines, rest = (self._rest + data).split(b"\n")
                self._rest = rest[: 4 * _LARGEST_LINE + 1]
                yield from _decode_lines(lines)
        if to_the_end:
            yield from _decode_lines([self._rest])
            self._rest = b""


def _decode_lines(lines: Iterable[bytes]) -> Iterator[str]:
    for line in lines:
        text = line.decode(errors="replace").strip()
        if text:
            yield text
