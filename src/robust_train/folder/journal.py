"""The record of a job: a JSON line per event, written as soon as it happens.

Nothing waits for the disk, which may take many seconds: a power cut costs the last lines, and they
decide nothing.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from robust_train.files import LineFile, Spacing, json_lines, strict_json
from robust_train.model.events import CheckpointSaved, Event, UserEvent

_MOST_OWED = 100


class Journal:
    """Appends events to ``journal.jsonl``, which stays small however long a job runs.

    Among frequent events, the last event of each kind is held until it is written or another kind
    of event happens. A full or missing disk costs one warning. Important events are written once
    the disk works again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = LineFile(path)
        self._spacing = Spacing()
        self._held: dict[str, bytes] = {}
        self._owed: list[bytes] = []

    def write(self, event: Event, attempt: int | None = None) -> None:
        """Append an event of attempt number ``attempt``, or of the job. NaN becomes null."""
        whose = {} if attempt is None else {"attempt": attempt}
        content = strict_json({"time": round(time.time(), 6), **whose, **event.as_json()})
        text = json.dumps(content, ensure_ascii=False, default=repr)
        line = (text + "\n").encode(errors="replace")
        if event.is_frequent:
            # each rank's own, and each event of the trainer's
            user_name = event.event_name if isinstance(event, UserEvent) else ""
            rank = getattr(event, "rank", None) or ""
            kind = self._spacing.limit_kind(f"{event.name} {user_name} {rank}")
            self._held.pop(kind, None)
            if not self._spacing.passes(kind, len(line)):
                self._held[kind] = line
                return
            held = b""
        else:
            held = b"".join(self._held.values())
            self._held.clear()
        matters = not event.is_frequent or isinstance(event, CheckpointSaved)
        if self._file.try_append(b"".join(self._owed + [held, line])):
            self._owed.clear()
        elif matters and len(self._owed) < _MOST_OWED:
            self._owed.append(line)


def attempts_in(path: Path) -> int:
    """Return the highest attempt number in a journal, skipping truncated lines. Raises OSError if
    the journal cannot be read."""
    attempts = 0
    with contextlib.suppress(FileNotFoundError):
        for content in filter(None, json_lines(path)):
            number = content.get("attempt")
            attempts = max(attempts, number if isinstance(number, int) else 0)
    return attempts
