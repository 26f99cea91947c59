"""``sweep_job.json`` in a job's run folder: the job as the sweep knows it.

A later launch of the same sweep reads there which overrides the folder was used with.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from robust_train.files import read_object, write_json
from robust_train.model.events import MalformedEvent, from_json

FILE = "sweep_job.json"
SCHEMA = 2

STARTED = "started"
COMPLETED = "completed"
REFUSED = "refused"
INTERRUPTED = "interrupted"
NOT_STARTED = "not_started"
DIED = "died"

_OF_THE_SWEEP = re.compile(r"\+{0,2}(sweep_resume|sweep_fail_fast|resume)=")


@dataclass(frozen=True)
class SweepJob:
    """How a job of a sweep is, as the sweep knows it.

    Attributes:
        job: its number; None if unknown.
        overrides: its own overrides.
        sweep: the launch of the sweep that wrote this; empty if unknown.
        status: ``started`` until its end is known, then ``completed``, ``failed``, ``no_device``,
            ``interrupted``, ``refused``, ``not_started``, or ``died`` without a summary.
        exit_code: that of the job if it had run alone; None before its end.
        result: the objective.
        reason: one sentence for any end but ``completed``.
        reused: it completed in an earlier launch of the sweep, and was not run again.
    """

    job: int | None
    overrides: tuple[str, ...]
    sweep: str = ""
    status: str = STARTED
    exit_code: int | None = None
    result: Any = None
    reason: str | None = None
    reused: bool = False

    def write(self, folder: Path) -> None:
        """Write the record to the job's run folder, whole or not at all."""
        write_json(folder / FILE, {"schema": SCHEMA, **asdict(self)}, indent=2)


class JobStart(enum.Enum):
    """What to do with a job that is about to start."""

    RUN = "run"  # from the checkpoint that the run folder holds, if any
    RUN_ANEW = "run anew"  # the run folder holds another job's files, or resume is off
    REUSE = "reuse"  # completed earlier


def decide(
    record: SweepJob | None,
    *,
    completed: bool,
    overrides: Sequence[str],
    sweep: str,
    resume: bool,
) -> JobStart:
    """Return what to do with a job with these ``overrides`` in this launch of the ``sweep``.
    ``record`` is that of an earlier job in the run folder; ``completed`` means that one."""
    if record is None:
        return JobStart.RUN if resume else JobStart.RUN_ANEW
    # whatever the order, and how they are resumed
    before, now = (
        sorted(one for one in each if not _OF_THE_SWEEP.match(one))
        for each in (record.overrides, overrides)
    )
    if before != now:
        return JobStart.RUN_ANEW
    if record.sweep == sweep:  # put back into the queue by a scheduler
        return JobStart.RUN
    if not resume:
        return JobStart.RUN_ANEW
    return JobStart.REUSE if completed else JobStart.RUN


def read_record(folder: Path) -> SweepJob | None:
    """Return the record in a run folder; None if there is none that can be read."""
    try:
        return from_json(SweepJob, read_object(folder / FILE))
    except MalformedEvent:
        return None
