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
from robust_train.runfolder.thinning import is_thinned, thin

log = logging.getLogger("robust_train")

_MOST_OWED = 100


class Journal:
    """Appends events to ``journal.jsonl``, which stays small however long a job runs.

    A disk that is full or gone must not end a training run: the first failure is warned about, and
    later events are still tried. An event that tells how the job stands is written again then.

    Args:
        path: the file; its folder must exist.
        slack_bytes: how much of what may be thinned is appended before that is done.
    """

    def __init__(self, path: Path, *, slack_bytes: int = 512 * 1024) -> None:
        self.path = path
        self._warned = False
        self._after_torn_line = _ends_torn(path)
        self._owed: list[bytes] = []
        self._slack = slack_bytes
        self._grown = path.stat().st_size if path.is_file() else 0

    def write(self, event: Event, attempt: int | None = None) -> None:
        """Append one event; NaN and infinities become null.

        Args:
            event: what happened.
            attempt: number of the attempt that it concerns, None for the job.
        """
        found = {} if attempt is None else {"attempt": attempt}
        content = {"time": round(time.time(), 6), **found, **event.as_json()}
        line = json.dumps(strict_json(content), ensure_ascii=False, default=repr)
        data = (line + "\n").encode(errors="replace")
        is_many = is_thinned(event.name)
        is_truth = not is_many or isinstance(event, CheckpointSaved)
        try:
            self._append(b"".join((*self._owed, data)), durable=is_truth)
            self._owed.clear()
            data = b""
            self._grown += len(line) if is_many else 0
            if self._grown > self._slack:
                self._grown = 0
                thin(self.path)
        except OSError as error:
            if is_truth and data and len(self._owed) < _MOST_OWED:
                self._owed.append(data)
            if not self._warned:
                log.warning("cannot write %s: %s; training goes on", self.path, error.strerror)
                self._warned = True

    def _append(self, data: bytes, *, durable: bool) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            data = b"\n" + data if self._after_torn_line else data
            start = 0
            while start < len(data):
                start += os.write(descriptor, data[start:])
                self._after_torn_line = data[start - 1 : start] != b"\n"
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


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
    """Read what an earlier launch has written to the same journal; torn lines are skipped.

    Raises:
        OSError: it cannot be read just now.
    """
    attempts, checkpoint, found = 0, None, {}
    if path.exists() and not (path.is_file() or path.is_dir()):
        return Earlier()  # a device or a pipe may have no end
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return Earlier()
    with file:
        for line in file:
            try:
                content = json.loads(line.decode("utf-8", "replace"))
                event = parse(content)
            except (ValueError, RecursionError):
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
