"""The record of a job: one JSON line per event, on disk as soon as it happens."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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

    def write(self, event: str, **fields: Any) -> None:
        """Append one event. ``fields`` hold JSON's types; NaN and infinities become null."""
        line = json.dumps(
            strict_json({"time": round(time.time(), 6), "event": event, **fields}),
            ensure_ascii=False,
        )
        data = (line + "\n").encode()
        try:
            # one write(2) on an O_APPEND descriptor: a torn line can only be the last one
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                os.write(descriptor, data)
            finally:
                os.close(descriptor)
        except OSError as error:
            if not self._warned:
                log.warning("cannot write %s: %s; training goes on", self.path, error.strerror)
                self._warned = True


def strict_json(value: Any) -> Any:
    """``value`` with NaN and infinities, which JSON has no words for, replaced by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): strict_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_json(item) for item in value]
    return value
