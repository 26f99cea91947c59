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
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum

LIMIT_BYTES = 32768
LAST_TICKET = 10**15 - 1
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
}


class JobState(str, Enum):
    """A job waits, has GPUs, or leaves some whose memory is not back yet."""

    WAITING = "waiting"
    RUNNING = "running"
    DRAINING = "draining"


@dataclass(frozen=True)
class JobRecord:
    """What a job shows the other jobs of its host.

    Attributes:
        id: unique among the jobs of this boot.
        ticket: orders the queue, lower goes first. Kept for the whole life of the job.
        started: when the launcher's process ``pid`` started, seconds since boot.
        reserved_bytes: memory that it needs on each of its ``count`` GPUs.
        jobs_per_device: maximum number of jobs per GPU that it accepts, including itself.
        only: UUIDs of the GPUs that it may use; none while its driver does not answer.
        gpus: UUIDs of its GPUs, in the order of its ranks: all of them or none.
        taken_bytes: least that its attempt has allocated on each of them; None where unknown.
        queued_at: when it came, in seconds since boot (CLOCK_BOOTTIME).
        since: when it came into this state.
    """

    id: str
    ticket: int
    state: JobState
    user: str
    uid: int
    pid: int
    started: float
    name: str
    run_dir: str
    reserved_bytes: int
    count: int = 1
    jobs_per_device: int = 1
    only: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    taken_bytes: tuple[int | None, ...] = ()
    queued_at: float = 0.0
    since: float = 0.0

    def on(
        self, gpus: Sequence[str], reserved_bytes: int | None = None, state: JobState | None = None
    ) -> JobRecord:
        """Return the same job with these GPUs, which are taken anew."""
        return replace(
            self,
            state=state or (JobState.RUNNING if gpus else JobState.WAITING),
            gpus=tuple(gpus),
            taken_bytes=(None,) * len(gpus),
            reserved_bytes=self.reserved_bytes if reserved_bytes is None else reserved_bytes,
        )


def encode(record: JobRecord) -> bytes:
    """Return the record as a file's content."""
    values = asdict(record) | {"state": record.state.value}
    for key in ("user", "name", "run_dir"):
        values[key] = values[key][:_MOST_TEXT]
    line = json.dumps(values, separators=(",", ":")).encode()
    content = f"{zlib.crc32(line):08x} ".encode() + line
    pages = -(-(len(content) + 1) // _PAGE_BYTES)
    return content.ljust(pages * _PAGE_BYTES - 1) + b"\n"


@functools.lru_cache(maxsize=256)  # most records are the same at the next poll
def decode(data: bytes) -> JobRecord | None:
    """Return the record in a file's content; None for anything else."""
    line = data[_CHECKSUM:].rstrip()
    try:
        if int(data[: _CHECKSUM - 1], 16) != zlib.crc32(line):
            return None
        values = json.loads(line)
        return _checked({name: values[name] for name in _NAMES})
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None


def printable(text: str, most: int = _MOST_TEXT) -> str:
    """Return the first line of ``text`` without anything that could steer a terminal."""
    line = (text.splitlines() or [""])[0]
    return "".join(c if c.isprintable() else "?" for c in line)[:most]


_NAMES = tuple(item.name for item in fields(JobRecord))


def _checked(given: dict[str, object]) -> JobRecord:
    record = JobRecord(
        id=_text(given["id"]),
        state=JobState(given["state"]),
        user=_text(given["user"]),
        name=_text(given["name"]),
        run_dir=_text(given["run_dir"]),
        only=_uuids(given["only"]),
        gpus=_uuids(given["gpus"]),
        taken_bytes=_sizes(given["taken_bytes"]),
        started=_seconds(given["started"]),
        queued_at=_seconds(given["queued_at"]),
        since=_seconds(given["since"]),
        **{name: _integer(given[name], *limits) for name, limits in _RANGES.items()},
    )
    needed = 0 if record.state is JobState.WAITING else record.count
    if not len(record.gpus) == len(set(record.gpus)) == len(record.taken_bytes) == needed:
        raise ValueError("a job has all its GPUs unless it waits, and then none")
    return record


def _integer(value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError
    return value


def _seconds(value: object) -> float:
    if type(value) not in (int, float) or not 0 <= value < _LATEST_SECONDS:  # type: ignore[operator]
        raise ValueError
    return float(value)  # type: ignore[arg-type]


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _MOST_TEXT:
        raise ValueError
    return printable(value)


def _uuids(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > _MOST_GPUS:
        raise ValueError
    if not all(isinstance(uuid, str) and _UUID.fullmatch(uuid) for uuid in value):
        raise ValueError
    return tuple(value)


def _sizes(value: object) -> tuple[int | None, ...]:
    if not isinstance(value, list):
        raise TypeError
    return tuple(None if size is None else _integer(size, 0, 2**50) for size in value)
