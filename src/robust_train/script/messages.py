"""What a script reports: lines of JSON in the file that ``ROBUST_TRAIN_EVENTS`` names.

::

    echo '{"event": "progress", "step": 10, "loss": 0.5}' >> "$ROBUST_TRAIN_EVENTS"

A file, because any language can append to one, also from a process several wrappers below, and
nobody is ever blocked by it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robust_train.events import Event, MalformedEvent, UserEvent
from robust_train.events import parse as parse_event
from robust_train.values import FailureKind

# the launcher's own events, and the fields that it adds to each
_OURS = frozenset(
    {
        "attempt_ended",
        "attempt_started",
        "device_acquired",
        "finished",
        "job_ended",
        "job_started",
        "lost_race",
        "script_ended",
        "script_started",
        "stalled",
        "waited_in_vain",
    }
)
_OUR_FIELDS = frozenset({"event", "attempt", "time"})
_INT_FIELDS: dict[str, tuple[str, ...]] = {
    "progress": ("step",),
    "started": ("step",),
    "training_started": ("step",),
}
_LARGEST_LINE = 50_000


_OF_A_RUN = ("micro_batch_changed", "micro_batch_exhausted", "memory", "memory_cleared", "epoch")
"""Events that :func:`robust_train.current_run` sends besides the documented messages."""


class NotUnderstood(ValueError):
    """A line that is no message; the text is the reason."""


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        event: ``progress``, ``started``, ``checkpoint``, ``result``, ``failed``, or a name of the
            script's own, which goes into the journal.
        fields: the rest of it.
    """

    event: str
    fields: Mapping[str, Any]


def parse(line: str) -> Message:
    """One line as a message.

    Raises:
        NotUnderstood: it is not one.
    """
    if len(line) > _LARGEST_LINE:
        raise NotUnderstood(f"longer than {_LARGEST_LINE} characters")
    try:
        data = json.loads(line)
    except ValueError as error:
        raise NotUnderstood(f"not JSON: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("event"), str):
        raise NotUnderstood('not an object with a name under "event"')
    event = data["event"]
    if event in _OURS:
        raise NotUnderstood(f"event {event!r} is the launcher's own")
    fields = {key: value for key, value in data.items() if key not in _OUR_FIELDS}
    for key in _INT_FIELDS.get(event, ()):
        if not _is_count(fields.get(key)):
            raise NotUnderstood(f"{event} needs {key}, an integer of 0 or more")
    if event == "progress":
        total = fields.get("total_steps")
        if total is not None and not _is_count(total):
            raise NotUnderstood("total_steps must be an integer of 0 or more")
    if event == "checkpoint" and not (isinstance(fields.get("path"), str) and fields["path"]):
        raise NotUnderstood("checkpoint needs path, a string")
    if event == "result" and "value" not in fields:
        raise NotUnderstood("result needs value")
    if event == "failed":
        kinds = [kind.value for kind in FailureKind]
        if fields.get("kind") not in kinds:
            raise NotUnderstood(f"failed needs kind, one of {', '.join(kinds)}")
        fields["message"] = str(fields.get("message", "reported by the script"))
    return Message(event, fields)


def metrics_of(message: Message) -> dict[str, float]:
    """Return the numbers of a ``progress`` message beside its steps."""
    nested = message.fields.get("metrics")
    fields = {**message.fields, **(nested if isinstance(nested, Mapping) else {})}
    return {
        key: value
        for key, value in fields.items()
        if key not in ("step", "total_steps") and isinstance(value, (int, float))
    }


def event_of(message: Message) -> Event:
    """Return the event of any other message: one of a run's, or the script's own."""
    if message.event in _OF_A_RUN:
        with contextlib.suppress(MalformedEvent):
            return parse_event({"event": message.event, **message.fields})
    if message.event == "user" and isinstance(message.fields.get("event_name"), str):
        fields = message.fields.get("fields")
        return UserEvent(message.fields["event_name"], fields if isinstance(fields, dict) else {})
    return UserEvent(message.event, message.fields)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class LineReader:
    """Whole lines as they are appended to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def read(self, *, to_the_end: bool = False) -> list[str]:
        """The lines that came since the last call; ``to_the_end``: a torn last one included."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if to_the_end:
            lines.append(self._rest)
            self._rest = b""
        return [text for line in lines if (text := line.decode(errors="replace").strip())]
