"""Writes ``journal.jsonl``, the history of a job: one JSON line per event.

The launcher appends each event as it happens. It never waits for the disk, which may take many
seconds, so a power cut may lose the last lines. That is harmless, because no decision depends on
the journal.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from robust_train.files import LineFile, Spacing, json_lines, strict_json
from robust_train.model.events import CheckpointSaved, Event, Json, UserEvent

# The most lines that are kept in memory while the disk is full.
_MOST_OWED = 100


class Journal:
    """Appends events to ``journal.jsonl``, which stays small however long a job runs.

    Frequent events, such as progress, are thinned out: the longer a job runs, the fewer of each
    kind are written. The newest omitted line of each kind is held, and written before the next
    infrequent event. A full or missing disk causes one warning, and important events are written
    once the disk works again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = LineFile(path)
        self._spacing = Spacing()
        self._held: dict[str, bytes] = {}
        self._owed: list[bytes] = []

    def write(self, event: Event, attempt: int | None = None) -> None:
        """Append an event of an attempt or, without ``attempt``, of the job. NaN becomes null."""
        line = _encode(event, attempt)
        held = b""
        if event.is_frequent:
            # Each rank and each of the trainer's own event names counts as a separate kind.
            user_name = event.event_name if isinstance(event, UserEvent) else ""
            rank = getattr(event, "rank", None) or ""
            kind = self._spacing.limit_kind(f"{event.name} {user_name} {rank}")
            self._held.pop(kind, None)
            if not self._spacing.passes(kind, len(line)):
                self._held[kind] = line
                return
        else:
            held = b"".join(self._held.values())
            self._held.clear()
        is_important = not event.is_frequent or isinstance(event, CheckpointSaved)
        if self._file.try_append(b"".join(self._owed + [held, line])):
            self._owed.clear()
        elif is_important and len(self._owed) < _MOST_OWED:
            self._owed.append(line)


def _encode(event: Event, attempt: int | None) -> bytes:
    """Return the journal's line for an event."""
    content: dict[str, Json] = {"time": round(time.time(), 6)}
    if attempt is not None:
        content["attempt"] = attempt
    content |= event.as_json()
    text = json.dumps(strict_json(content), ensure_ascii=False, default=repr)
    return (text + "\n").encode(errors="replace")


def attempts_in(path: Path) -> int:
    """Return the highest attempt number in a journal, or 0 if it mentions no attempt.

    Truncated lines are skipped.

    Raises:
        OSError: the journal cannot be read.
    """
    highest = 0
    with contextlib.suppress(FileNotFoundError):
        for content in json_lines(path):
            number = content.get("attempt") if content else None
            if isinstance(number, int):
                highest = max(highest, number)
    return highest
