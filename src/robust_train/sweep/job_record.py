"""``sweep_job.json``: what a sweep knows of a job, and what a repeated sweep does with it.

It lies in the job's run folder from the job's start, whichever launcher runs the job. From it a
later launch of the same sweep reads which overrides the folder was used with.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from robust_train.events import MalformedEvent, from_json
from robust_train.files import replacing
from robust_train.runfolder.journal import strict_json

FILE = "sweep_job.json"
SCHEMA = 1

STARTED = "started"
COMPLETED = "completed"
REFUSED = "refused"
INTERRUPTED = "interrupted"
NOT_STARTED = "not_started"
DIED = "died"

_OF_THE_SWEEP = re.compile(r"\+{0,2}(sweep_resume|sweep_fail_fast|resume)=")
_ATTEMPT_LOG = re.compile(r"attempt-\d+\.log")


@dataclass(frozen=True)
class JobRecord:
    """One job of a sweep.

    Attributes:
        sweep: which launch of the sweep wrote this.
        number: counted from 0 in the sweep.
        overrides: those of this job, without Hydra's own.
        status: ``started`` until the job's end is known, then how it ended.
        exit_code: what the job alone would have exited with, None before its end.
        objective: what the sweeper got.
        reason: one sentence for any end but ``completed``.
        reused: completed in an earlier launch of the sweep, not run again.
    """

    sweep: str
    number: int | None
    overrides: tuple[str, ...]
    status: str = STARTED
    exit_code: int | None = None
    objective: Any = None
    reason: str | None = None
    reused: bool = False

    def write(self, folder: Path) -> None:
        """Put the record into the job's run folder, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        write_json(folder / FILE, {"schema": SCHEMA, **asdict(self)})


class Entry(enum.Enum):
    """What to do with a job that is about to start."""

    RUN = "run"  # from the checkpoint that the run folder holds, if any
    RUN_ANEW = "run anew"  # what the run folder holds is of another job, or not wanted
    REUSE = "reuse"  # completed earlier


def decide(
    record: JobRecord | None,
    *,
    completed: bool,
    overrides: Sequence[str],
    sweep: str,
    resume: bool,
) -> Entry:
    """Return what to do with a job, given what an earlier one left in its run folder.

    Args:
        record: that of the earlier job, None where there is none.
        completed: it completed.
        overrides: of the job that is about to start.
        sweep: this launch of the sweep.
        resume: ``sweep_resume``.
    """
    if record is None:
        return Entry.RUN if resume else Entry.RUN_ANEW
    if not same_overrides(record.overrides, overrides):
        return Entry.RUN_ANEW
    if record.sweep == sweep:  # put back into the queue by a scheduler
        return Entry.RUN
    if not resume:
        return Entry.RUN_ANEW
    return Entry.REUSE if completed else Entry.RUN


def same_overrides(one: Sequence[str], other: Sequence[str]) -> bool:
    """Return whether two jobs are the same, whatever the order and how they are resumed."""
    first, second = (sorted(o for o in all if not _OF_THE_SWEEP.match(o)) for all in (one, other))
    return first == second


def read_record(folder: Path) -> JobRecord | None:
    """Return the record in a run folder, None where there is none that can be read."""
    try:
        return from_json(JobRecord, read_json(folder / FILE))
    except MalformedEvent:
        return None


def set_aside(folder: Path) -> Path | None:
    """Move what an earlier job left into ``earlier-<n>/``; None where it left nothing.

    What Hydra has just put there for the new job stays: its ``.hydra`` folder and open log files.
    """
    left = [item for item in folder.iterdir() if not _is_of_the_new_job(item)]
    if not left:
        return None
    number = 1
    while (earlier := folder / f"earlier-{number}").exists():
        number += 1
    earlier.mkdir()
    for item in left:
        item.rename(earlier / item.name)
    return earlier


def _is_of_the_new_job(item: Path) -> bool:
    name = item.name
    if name.startswith("earlier-") or name == ".hydra":
        return True
    return name.endswith(".log") and not _ATTEMPT_LOG.fullmatch(name)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None where it is absent, torn or something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_json(path: Path, content: Any) -> None:
    """Write a file of JSON, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps(strict_json(content), indent=2, ensure_ascii=False, default=str)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
