"""How far a job of a sweep is, read from its journal while it runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Progress:
    """What the live table shows of a job.

    Attributes:
        status: ``pending``, ``starting``, ``waiting`` (for a device), ``running``, or how it ended.
        attempt: number of the current attempt, None before the first.
        device: of the current attempt.
        batch_size: of the current attempt.
        step: last optimizer step that was reported.
        total_steps: where the trainer knows.
    """

    status: str = "pending"
    attempt: int | None = None
    device: str | None = None
    batch_size: int | None = None
    step: int | None = None
    total_steps: int | None = None


def advance(progress: Progress, event: Mapping[str, Any]) -> Progress:
    """The progress after one event of the journal."""
    kind = event.get("event")
    if kind == "job_started":
        return Progress("waiting")
    if kind == "attempt_started":
        return Progress(
            "running",
            attempt=event.get("attempt"),
            device=event.get("device"),
            batch_size=event.get("batch_size"),
        )
    if kind == "batch_size_found":
        return replace(progress, batch_size=event.get("batch_size") or progress.batch_size)
    if kind == "progress":
        return replace(progress, step=event.get("step"), total_steps=event.get("total_steps"))
    if kind == "job_ended":
        return replace(progress, status=str(event.get("status")))
    return progress


class JournalFollower:
    """Reads on in a job's journal, from where it ends now.

    Args:
        path: the journal; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.progress = Progress()
        self._path = path
        self._file: tuple[int, int] | None = None
        self._read = 0
        if (status := self._status()) is not None:
            self._file, self._read = (status.st_dev, status.st_ino), status.st_size

    def look(self) -> Progress:
        """Take in what was written since the last look."""
        status = self._status()
        if status is None:
            return self.progress
        file = (status.st_dev, status.st_ino)
        if file != self._file:  # an earlier job's journal was moved aside
            self._file, self._read = file, 0
        if status.st_size <= self._read:
            return self.progress
        try:
            with self._path.open("rb") as journal:
                journal.seek(self._read)
                data = journal.read()
        except OSError:
            return self.progress
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                self.progress = advance(self.progress, event)
        return self.progress

    def _status(self) -> Any:
        try:
            return self._path.stat()
        except OSError:
            return None
