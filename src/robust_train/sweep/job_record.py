"""``sweep_job.json`` in a job's run folder: the job as the sweep knows it.

From it a later launch of the same sweep reads which overrides the folder was used with.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from robust_train.events import MalformedEvent, from_json
from robust_train.files import read_object, write_json

FILE = "sweep_job.json"
SCHEMA = 1

STARTED = "started"
COMPLETED = "completed"
REFUSED = "refused"
INTERRUPTED = "interrupted"
NOT_STARTED = "not_started"
DIED = "died"

_OF_THE_SWEEP = re.compile(r"\+{0,2}(sweep_resume|sweep_fail_fast|resume)=")


@dataclass(frozen=True)
class JobRecord:
    """One job of a sweep; fields as in ``sweep.json``."""

    sweep: str  # the launch of the sweep that wrote this
    number: int | None
    overrides: tuple[str, ...]
    status: str = STARTED  # `started` until the job's end is known
    exit_code: int | None = None  # that of the job alone, None before its end
    objective: Any = None
    reason: str | None = None
    reused: bool = False

    def write(self, folder: Path) -> None:
        """Write the record into the job's run folder, whole or not at all. Raises OSError: it
        cannot be written."""
        write_json(folder / FILE, {"schema": SCHEMA, **asdict(self)}, indent=2)


class Entry(enum.Enum):
    """What to do with a job that is about to start."""

    RUN = "run"  # from the checkpoint that the run folder holds, if any
    RUN_ANEW = "run anew"  # what the run folder holds is of another job, or not wanted
    REUSE = "reuse"  # completed earlier


def decide(
    record: JobRecord | None, *, completed: bool, overrides: Sequence[str], sweep: str, resume: bool
) -> Entry:
    """Return what to do with a job with these ``overrides`` in this launch of the ``sweep``.
    ``record`` is that of an earlier job in the run folder; ``completed`` means that one."""
    if record is None:
        return Entry.RUN if resume else Entry.RUN_ANEW
    # whatever the order, and how they are resumed
    before, now = (
        sorted(one for one in each if not _OF_THE_SWEEP.match(one))
        for each in (record.overrides, overrides)
    )
    if before != now:
        return Entry.RUN_ANEW
    if record.sweep == sweep:  # put back into the queue by a scheduler
        return Entry.RUN
    if not resume:
        return Entry.RUN_ANEW
    return Entry.REUSE if completed else Entry.RUN


def read_record(folder: Path) -> JobRecord | None:
    """Return the record in a run folder, None where there is none that can be read."""
    try:
        return from_json(JobRecord, read_object(folder / FILE))
    except MalformedEvent:
        return None
