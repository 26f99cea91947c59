"""A job's record in the queue directory: a frozen value, and its form in a file.

The form is a checksum and one line of JSON, padded to whole pages: a write replaces it in place
(a new file would be another lock), and a torn, truncated or foreign content is told from a record.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from typing import Any

LIMIT_BYTES = 32768
_PAGE_BYTES = 4096
_MOST_TEXT = 300
_CHECKSUM = 9  # eight digits and a space


class JobState(str, Enum):
    """How a job stands: in line, on its GPUs, or leaving some whose memory is not back yet."""

    WAITING = "waiting"
    RUNNING = "running"
    DRAINING = "draining"


@dataclass(frozen=True)
class JobRecord:
    """What a job tells the other jobs of its host.

    Attributes:
        id: unique among the jobs of this boot.
        ticket: its place in line; lower goes first. Kept for the whole life of the job.
        state: waiting, running or draining.
        user: the owner's name.
        uid: the owner's number.
        pid: the launcher's process.
        start_ticks: when that process started, in clock ticks since boot, against reused ids.
        name: what people know the job by.
        run_dir: its run folder.
        claim_bytes: memory that it needs on each of its GPUs.
        count: GPUs that it needs at once.
        jobs_per_device: how many jobs it suffers on a GPU of its own, itself included.
        only: UUIDs of the GPUs that it may use.
        sees: UUIDs of the GPUs that it can look at for others.
        gpus: UUIDs of the GPUs that it has, in the order of its ranks; none while it waits, and
            never some of those that it needs.
        taken_bytes: what its attempt has allocated at least on each of them; None where not known.
        queued_at: when it came, in seconds since boot (CLOCK_BOOTTIME).
        since: when it came into this state.
    """

    id: str
    ticket: int
    state: JobState
    user: str
    uid: int
    pid: int
    start_ticks: int
    name: str
    run_dir: str
    claim_bytes: int
    count: int = 1
    jobs_per_device: int = 1
    only: tuple[str, ...] = ()
    sees: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    taken_bytes: tuple[int | None, ...] = ()
    queued_at: float = 0.0
    since: float = 0.0

    def on(
        self, gpus: Sequence[str], claim_bytes: int | None = None, state: JobState | None = None
    ) -> JobRecord:
        """The same job with these GPUs, of which nothing is known to be taken.

        Args:
            gpus: their UUIDs.
            claim_bytes: memory that it needs there; None: as before.
            state: how it stands there; running if not said, or waiting without GPUs.
        """
        return replace(
            self,
            state=state or (JobState.RUNNING if gpus else JobState.WAITING),
            gpus=tuple(gpus),
            taken_bytes=(None,) * len(gpus),
            claim_bytes=self.claim_bytes if claim_bytes is None else claim_bytes,
        )


def encode(record: JobRecord) -> bytes:
    """The record as a file's content, a whole number of pages."""
    values = asdict(record) | {"state": record.state.value}
    for key in ("user", "name", "run_dir"):
        values[key] = values[key][:_MOST_TEXT]
    line = json.dumps(values, separators=(",", ":")).encode()
    content = f"{zlib.crc32(line):08x} ".encode() + line
    pages = -(-(len(content) + 1) // _PAGE_BYTES)
    return content.ljust(pages * _PAGE_BYTES - 1) + b"\n"


def decode(data: bytes) -> JobRecord | None:
    """The record in a file's content; None for anything else."""
    line = data[_CHECKSUM:].rstrip()
    try:
        if int(data[: _CHECKSUM - 1], 16) != zlib.crc32(line):
            return None
        values = json.loads(line)
        return _from_values(values)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


_NAMES = tuple(item.name for item in fields(JobRecord))
_SIZES = ("ticket", "claim_bytes", "count", "jobs_per_device", "uid", "pid", "start_ticks")


def _from_values(values: dict[str, Any]) -> JobRecord:
    """Checks every value: a checksum shows an accident, not a lie."""
    given = {name: values[name] for name in _NAMES}
    for name in _SIZES:
        if not _is_size(given[name]):
            raise ValueError(name)
    for name in ("count", "jobs_per_device"):
        if given[name] < 1:
            raise ValueError(name)
    for name in ("id", "user", "name", "run_dir"):
        if not isinstance(given[name], str):
            raise ValueError(name)
        # what is shown on a terminal must not steer it
        given[name] = "".join(c if c.isprintable() else "?" for c in given[name])
    for name in ("only", "sees", "gpus"):
        uuids = given[name]
        if not isinstance(uuids, list) or not all(isinstance(uuid, str) for uuid in uuids):
            raise ValueError(name)
        given[name] = tuple(uuids)
    taken = given["taken_bytes"]
    if not isinstance(taken, list) or not all(t is None or _is_size(t) for t in taken):
        raise ValueError("taken_bytes")
    given["taken_bytes"] = tuple(taken)
    for name in ("queued_at", "since"):
        given[name] = float(given[name])
    given["state"] = JobState(given["state"])
    gpus = given["gpus"]
    needs = 0 if given["state"] is JobState.WAITING else given["count"]
    if not len(gpus) == len(set(gpus)) == len(taken) == needs:
        raise ValueError("a job has all its GPUs unless it waits, and then none")
    return JobRecord(**given)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**62
