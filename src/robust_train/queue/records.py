"""A job's record in the queue directory: a frozen value, and its form in a file.

The form is a checksum and one line of JSON, padded to whole pages, so that a write replaces it in
place. :func:`decode` checks every field: a checksum shows an accident, not a lie.
"""

from __future__ import annotations

import functools
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from robust_train.files import from_json

LIMIT_BYTES = 32768
LAST_TICKET = 10**15 - 1
IDLE_SECONDS = 3600
_PAGE_BYTES = 4096
_MOST_TEXT = 300
_MOST_GPUS = 256
_CHECKSUM = 9  # eight digits and a space
_UUID = re.compile(r"[A-Za-z0-9/_-]{1,100}", re.ASCII)
_LATEST_SECONDS = 1e10
# inclusive ranges of the integers
_RANGES = {
    "ticket": (0, LAST_TICKET),
    "uid": (0, 2**32 - 1),
    "pid": (0, 2**31 - 1),
    "reserved_bytes": (0, 2**50),
    "count": (1, _MOST_GPUS),
    "jobs_per_device": (1, 2**20),
    "overtaken": (0, 2**31 - 1),
}


class JobState(str, Enum):
    """A job waits, has GPUs, or leaves some whose memory is not back yet."""

    WAITING = "waiting"
    RUNNING = "running"
    DRAINING = "draining"


@dataclass(frozen=True)
class JobRecord:
    """What a job shows the other jobs of its host."""

    id: str  # unique among the jobs of this boot
    ticket: int  # orders the queue, lower goes first. Kept for the whole life of the job.
    state: JobState
    user: str
    uid: int
    pid: int
    started: float  # when the launcher's process `pid` started, seconds since boot
    name: str
    run_dir: str
    reserved_bytes: int  # memory that it needs on each of its `count` GPUs
    count: int = 1
    jobs_per_device: int = 1  # maximum number of jobs per GPU that it accepts, including itself
    # UUIDs of the GPUs that it may use; none while its driver does not answer
    only: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()  # UUIDs of its GPUs, in the order of its ranks: all of them or none
    # least that its attempt has allocated on each of them; None where unknown
    taken_bytes: tuple[int | None, ...] = ()
    queued_at: float = 0.0  # when it came, in seconds since boot (CLOCK_BOOTTIME)
    since: float = 0.0  # when it came into this state
    charged_at: float = 0.0  # until then its GPU time is in its user's usage file
    # when each of its GPUs was last seen busy; none where nobody looks
    busy_at: tuple[float, ...] = ()
    # later jobs of others that started while it was its user's first waiting job
    overtaken: int = 0

    def on(
        self, gpus: Sequence[str], reserved_bytes: int | None = None, state: JobState | None = None
    ) -> JobRecord:
        """Return the same job with these GPUs, which are taken anew."""
        return replace(
            self,
            state=state or (JobState.RUNNING if gpus else JobState.WAITING),
            gpus=tuple(gpus),
            taken_bytes=(None,) * len(gpus),
            busy_at=(),
            reserved_bytes=self.reserved_bytes if reserved_bytes is None else reserved_bytes,
        )

    def idle(self) -> dict[str, int]:
        """Return for how many seconds GPUs of it have been idle, where that is over an hour."""
        times = zip(self.gpus, (self.charged_at - at for at in self.busy_at), strict=False)
        return {uuid: int(seconds) for uuid, seconds in times if seconds >= IDLE_SECONDS}


def encode(record: JobRecord) -> bytes:
    """Return the record as a file's content."""
    values = asdict(record) | {"state": record.state.value}
    for key in ("user", "name", "run_dir"):
        values[key] = values[key][:_MOST_TEXT]
    return sealed(values)


def sealed(values: Any) -> bytes:
    """Return JSON as the content of a file that is replaced in place."""
    line = json.dumps(values, separators=(",", ":")).encode()
    content = f"{zlib.crc32(line):08x} ".encode() + line
    pages = -(-(len(content) + 1) // _PAGE_BYTES)
    return content.ljust(pages * _PAGE_BYTES - 1) + b"\n"


@functools.lru_cache(maxsize=256)  # most records are the same at the next poll
def decode(data: bytes) -> JobRecord | None:
    """Return the record in a file's content; None for anything else."""
    try:
        values = unsealed(data)
        # a record of the version before lacks it; one of a later version may have more
        return _checked(from_json(JobRecord, {"charged_at": values["since"]} | values))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None


def unsealed(data: bytes) -> Any:
    """Return the JSON in a file's content; ValueError or RecursionError: it is damaged."""
    line = data[_CHECKSUM:].rstrip()
    if int(data[: _CHECKSUM - 1], 16) != zlib.crc32(line):
        raise ValueError
    return json.loads(line)


def printable(text: str, most: int = _MOST_TEXT) -> str:
    """Return the first line of ``text`` without anything that could steer a terminal."""
    line = (text.splitlines() or [""])[0]
    return "".join(c if c.isprintable() else "?" for c in line)[:most]


def _checked(record: JobRecord) -> JobRecord:
    """Return the record if every value of it is possible; its types are right."""
    integers = all(low <= getattr(record, name) <= high for name, (low, high) in _RANGES.items())
    times = (record.started, record.queued_at, record.since, record.charged_at, *record.busy_at)
    uuids, sizes = (*record.only, *record.gpus), (size or 0 for size in record.taken_bytes)
    texts = {name: getattr(record, name) for name in ("id", "user", "name", "run_dir")}
    if not (
        integers
        and all(0 <= time < _LATEST_SECONDS for time in times)  # and not so for NaN
        and all(0 <= size <= 2**50 for size in sizes)
        and all(_UUID.fullmatch(uuid) for uuid in uuids)
        and all(len(text) <= _MOST_TEXT for text in texts.values())
        and max(len(record.only), len(record.gpus)) <= _MOST_GPUS
    ):
        raise ValueError("a value that cannot be")
    needed = 0 if record.state is JobState.WAITING else record.count
    if not len(record.gpus) == len(set(record.gpus)) == len(record.taken_bytes) == needed:
        raise ValueError("a job has all its GPUs unless it waits, and then none")
    shown: dict[str, Any] = {name: printable(text) for name, text in texts.items()}
    return replace(record, **shown)
