"""The record of a job: one JSON line per event, on disk as soon as it happens."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from robust_train.events import BatchSizeFound, CheckpointSaved, Event, JobEnded, parse

log = logging.getLogger("robust_train")


class Journal:
    """Appends events to ``journal.jsonl``.

    A disk that is full or gone must not end a training run: the first failure is warned about, and
    later events are still tried, so that the record goes on once there is room again.

    Args:
        path: the file; its folder must exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._warned = False
        self._after_torn_line = _ends_torn(path)

    def write(self, event: Event, attempt: int | None = None) -> None:
        """Append one event; NaN and infinities become null.

        Args:
            event: what happened.
            attempt: number of the attempt that it concerns, None for the job.
        """
        found = {} if attempt is None else {"attempt": attempt}
        content = {"time": round(time.time(), 6), **found, **event.as_json()}
        line = json.dumps(strict_json(content), ensure_ascii=False, default=repr)
        data = (line + "\n").encode()
        if self._after_torn_line:
            data = b"\n" + data
        try:
            # one write(2) on an O_APPEND descriptor: a torn line can only be the last one
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                os.write(descriptor, data)
                self._after_torn_line = False
            finally:
                os.close(descriptor)
        except OSError as error:
            if not self._warned:
                log.warning("cannot write %s: %s; training goes on", self.path, error.strerror)
                self._warned = True


@dataclass(frozen=True)
class Earlier:
    """What earlier launches left in a run folder.

    Attributes:
        attempts: the highest number of an attempt so far, 0 without any.
        checkpoint: the last one of a job that did not complete, None where there is none.
        found: micro-batches that probes have found, by what memory depends on.
    """

    attempts: int = 0
    checkpoint: Path | None = None
    found: Mapping[str, int] = field(default_factory=dict)


def read_earlier(path: Path) -> Earlier:
    """Read what an earlier launch has written to the same journal; torn lines are skipped."""
    attempts, checkpoint, found = 0, None, {}
    if not path.is_file():
        return Earlier()
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return Earlier()
    for line in lines:
        try:
            content = json.loads(line)
            event = parse(content)
        except ValueError:
            continue
        number = content.get("attempt")
        attempts = max(attempts, number if isinstance(number, int) else 0)
        if isinstance(event, CheckpointSaved):
            checkpoint = Path(event.path)
        elif isinstance(event, BatchSizeFound) and event.batch_size:
            found[event.key] = event.batch_size
        elif isinstance(event, JobEnded) and event.status == "completed":
            checkpoint = None
    if checkpoint is not None and not checkpoint.exists():
        checkpoint = None
    return Earlier(attempts, checkpoint, found)


def _ends_torn(path: Path) -> bool:
    """Whether the last line was cut short, as by a full disk or the end of its process."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return False


def strict_json(value: Any) -> Any:
    """``value`` with NaN and infinities, which JSON has no words for, replaced by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): strict_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_json(item) for item in value]
    return value
