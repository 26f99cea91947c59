"""GPUs that proved unhealthy under a job: excluded for the host's jobs for half an hour.

One small file per GPU and user in the queue directory. After that the GPU's own health decides, so
nobody's file can exclude a GPU for ever.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from robust_train.gpu.processes import user_name
from robust_train.queue.queue_dir import QueueDir
from robust_train.queue.records import printable
from robust_train.queue.reservations import boottime
from robust_train.values import GpuInfo

SECONDS = 1800.0
_LIMIT_BYTES = 4096
_MOST_TEXT = 200
_FILE = re.compile(r"unhealthy\.([A-Za-z0-9-]{1,80})\.(\d{1,10})", re.ASCII)


@dataclass(frozen=True)
class Exclusion:
    """An excluded GPU: why, since when (seconds since boot), and by whose job."""

    uuid: str
    reason: str
    since: float
    by: str

    def sentence(self, now: float) -> str:
        """Return for how long the GPU is excluded, by whom, and why."""
        left = (SECONDS - (now - self.since)) / 60
        return (
            f"excluded for another {left:.0f} min by a job of {self.by}: {self.reason} "
            f"(robust-train doctor --clear {self.uuid})"
        )


def read_exclusions(directory: QueueDir) -> list[Exclusion]:
    """Return the GPUs that are excluded now; unreadable and old files do not count."""
    found, now = [], boottime()
    for name, status, data in directory.files(_FILE, _LIMIT_BYTES):
        try:
            values = json.loads(data)
            reason = printable(str(values["reason"]), _MOST_TEXT)
            since = float(values["since"])
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            continue
        if 0 <= now - since < SECONDS:  # and not so for NaN
            found.append(Exclusion(name.split(".")[1], reason, since, user_name(status.st_uid)))
    return found


def exclude(directory: QueueDir, uuid: str, reason: str) -> bool:
    """Exclude a GPU from now on; return False if the directory takes no more files."""
    name = f"unhealthy.{uuid}.{os.geteuid()}"
    if not _FILE.fullmatch(name):
        return False
    directory.remove(name)
    content = json.dumps({"reason": printable(reason, _MOST_TEXT), "since": boottime()}).encode()
    try:
        fd = directory.create(name, 0o644)
        try:
            return os.write(fd, content) == len(content)
        finally:
            os.close(fd)
    except OSError:
        return False


def clear(directory: QueueDir, uuid: str) -> bool:
    """Use a GPU again; return False if no file of the caller's own excluded it."""
    mine = [f"unhealthy.{uuid}.{os.geteuid()}"]
    if os.geteuid() == 0:
        mine = [name for name in directory.names() if name.startswith(f"unhealthy.{uuid}.")]
    return bool([name for name in mine if directory.remove(name)])


def mark_excluded(gpus: Sequence[GpuInfo], excluded: Sequence[Exclusion]) -> tuple[GpuInfo, ...]:
    """Return the GPUs, excluded ones marked as unusable."""
    now = boottime()
    known = {item.uuid: item.sentence(now) for item in excluded}
    return tuple(
        replace(gpu, unusable=known[gpu.uuid]) if gpu.uuid in known and not gpu.unusable else gpu
        for gpu in gpus
    )
