"""A sweep on disk: ``sweep_job.json`` in each job's run folder, and ``sweep.json`` of all jobs.

A job has a single record, folded from its run folder, whichever launcher ran it. ``sweep.session``
and ``sweep.gpu_queue`` write it, the screen and commands show it, and a later launch of the sweep
reads it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robust_train.files import read_object, replacing, write_json
from robust_train.folder.lock import is_alive
from robust_train.folder.requests import SWEEP_FILE
from robust_train.folder.state import (
    EXIT_CODES,
    lacked_by_json,
    read_state,
    read_summary,
    with_lacked_by_json,
)
from robust_train.model.attempt import Attempt
from robust_train.model.errors import EXIT_BAD_CONFIG
from robust_train.model.events import SCHEMA, Json, MalformedEventError, from_json
from robust_train.model.spec import MAXIMIZE, MINIMIZE
from robust_train.readable import shorten, signal_name

if TYPE_CHECKING:
    from optuna.storages import JournalStorage

log = logging.getLogger("robust_train")

JOB_FILE = "sweep_job.json"
STUDY_FILE = "study.jsonl"
STUDY = "sweep"
_LINK = "job-"  # The job's number follows: a link to a job that lies elsewhere.
INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OF_THE_SWEEP = re.compile(
    r"\+{0,2}(robust\.)?(sweep_(direction|fail_fast|patience)|resume|detach|notify\.\w+|"
    r"queue_priority|wait_for_gpu|gpu_wait_timeout_minutes|max_launches|max_retries|"
    r"stall_timeout_minutes)="
)


def of_jobs(overrides: Iterable[str]) -> list[str]:
    """Return the overrides that say what jobs compute, and not only how they are run."""
    return [override for override in overrides if not _OF_THE_SWEEP.match(override)]


class Status:
    """The status of a job of a sweep, or of a sweep. For a running job it is the name of its
    state."""

    STARTED = "started"  # the status until the job's end is known
    COMPLETED = "completed"
    FAILED = "failed"
    REFUSED = "refused"
    INTERRUPTED = "interrupted"
    PRUNED = "pruned"
    NOT_STARTED = "not_started"
    DIED = "died"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep, as in ``sweep.json``. None means unknown or absent."""

    job: int  # its number
    overrides: tuple[str, ...]
    sweep: str = ""  # the id of the sweep's launch that ran or reused it
    status: str = Status.STARTED
    exit_code: int | None = None  # the exit code as if the job had run alone
    attempts: int = 0  # number of attempts in all its launches
    devices: tuple[str, ...] = ()  # devices of the attempts, in order, each once
    batch_size: int | None = None  # micro-batch size of the last attempt
    step: int | None = None  # the last reported step, of `total_steps`
    total_steps: int | None = None
    result: Any = None  # the objective
    wall_seconds: float | None = None
    wait_seconds: float | None = None  # the part of it spent waiting for a GPU
    reused: bool = False  # completed in an earlier launch of the sweep
    # one sentence for any end except `completed`, which has one only if it is in doubt
    reason: str | None = None
    folder: str | None = None  # None: not started
    # the number of the combination, which `repeat` jobs share
    trial: int | None = None

    @property
    def path(self) -> Path:
        """Its run folder, once it has started."""
        return Path(self.folder or "")

    @property
    def is_running(self) -> bool:
        """Whether it has begun and not ended."""
        return self.exit_code is None and self.status != Status.NOT_STARTED

    @property
    def has_completed(self) -> bool:
        """Whether it ran to its end, and may have a result."""
        return self.status == Status.COMPLETED

    @property
    def is_pruned(self) -> bool:
        """Whether it was ended early: it is over, and has no result."""
        return self.status == Status.PRUNED

    @property
    def objective(self) -> Any:
        """The value for the sweeper: NaN for a job that did not complete."""
        return self.result if self.has_completed else math.nan

    @property
    def value(self) -> float | None:
        """The result of a completed job for a search, or None if it is not a number."""
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            value = float(self.result)
            if self.has_completed and math.isfinite(value):
                return value
        return None

    @property
    def why(self) -> str | None:
        """The reason for its end, or why the result of a completed job cannot be ranked."""
        if self.reason or not self.has_completed or self.value is not None:
            return self.reason
        result = self.result
        what = "not a number"
        # NaN differs from itself; isnan() would raise for an integer that no float holds
        if isinstance(result, (int, float)) and result == result:
            what = "not finite"
        return f"its result is {what}: {shorten(repr(result), 100)}"

    def varies_as(self, other: SweepJob) -> bool:
        """Return whether the other job computes the same: the order of overrides does not matter,
        nor how a job is run."""
        ours, others = map(of_jobs, (self.overrides, other.overrides))
        return sorted(ours) == sorted(others)

    def refused(self, reason: str) -> SweepJob:
        """Return the job marked as refused."""
        return replace(self, status=Status.REFUSED, exit_code=EXIT_BAD_CONFIG, reason=reason)

    def write(self, folder: Path) -> None:
        """Write the record into the run folder, whole or not at all. A full disk costs a
        warning."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            content = {"schema": 2, **vars(self), **lacked_by_json(self.result)}
            write_json(folder / JOB_FILE, content, indent=2)
        except OSError as error:
            log.warning("cannot write to %s: %s", folder, error.strerror)

    def as_row(self) -> dict[str, Json]:
        """Return the row without the sweep's id, which the table has."""
        row = {**vars(self), "reason": self.why}
        del row["sweep"]
        return row

    def as_json(self) -> dict[str, Json]:
        """Return the row for ``sweep.json``."""
        return self.as_row() | lacked_by_json(self.result)

    @classmethod
    def parse(cls, content: Any) -> SweepJob:
        """Return the job in a file's content. Raises MalformedEventError if there is none."""
        return from_json(cls, with_lacked_by_json(content))


def begun(job: SweepJob, earlier: SweepJob | None, *, resume: bool) -> tuple[SweepJob, bool]:
    """Return the record of a job that is about to start in a folder that may have an ``earlier``
    record, and whether the folder's content belongs to this job, to be resumed.

    A job that is over joins this launch as it is.
    """
    if earlier is None:
        return job, resume
    # the same launch: Slurm put the job back into its queue, so it resumes anyway
    stays = job.varies_as(earlier) and (resume or earlier.sweep == job.sweep)
    if not stays or not (earlier.has_completed or earlier.is_pruned):
        return job, stays
    mine = {n: getattr(job, n) for n in ("job", "overrides", "sweep", "trial")}
    return replace(earlier, **mine, reused=True), True


def read_record(folder: Path) -> SweepJob | None:
    """Return the record in a run folder, or None if it cannot be read."""
    with contextlib.suppress(MalformedEventError):
        return SweepJob.parse(read_object(folder / JOB_FILE))
    return None


def read_row(folder: Path) -> SweepJob | None:
    """Return the job in ``folder`` as it is now, or None if its record cannot be read."""
    record = read_record(folder)
    return None if record is None else row_of(record, folder)


def row_of(job: SweepJob, folder: Path, returncode: int | None = None) -> SweepJob:
    """Return the job of this record as it is now, by its run folder. ``returncode`` is the exit
    code of its process, if the caller knows that the process has ended."""
    summary = read_summary(folder)
    attempts = tuple[Attempt, ...]()
    state = read_state(folder)
    has_ended = state is None or state.is_final
    job = replace(job, folder=str(folder))
    if summary is not None:
        attempts = summary.attempts
        job = replace(job, wall_seconds=summary.wall_seconds, wait_seconds=summary.wait_seconds)
    if job.status != Status.STARTED:
        pass  # recorded by its own process
    elif summary is not None:
        status = summary.status
        job = replace(
            job,
            status=status,
            exit_code=EXIT_CODES.get(status, 143),  # interrupted
            reason=summary.reason,
            result=summary.objective if status == Status.COMPLETED else None,
        )
    elif returncode is None and is_alive(folder, has_ended=has_ended):
        job = replace(job, status=Status.RUNNING)
        if state is not None and not state.is_final:
            job = replace(job, status=state.state)
            attempts = (state.attempt,) if state.attempt else ()
    else:
        status, code, reason = ending_of_process(returncode)
        job = replace(job, status=status, exit_code=code, reason=reason)
    if not attempts:
        return job
    last = attempts[-1]
    return replace(
        job,
        attempts=last.number,
        devices=tuple(dict.fromkeys(attempt.spec.device for attempt in attempts)),
        batch_size=last.spec.batch_size if last.spec.has_batch else None,
        step=last.step,
        total_steps=last.total_steps,
    )


def ending_of_process(returncode: int | None) -> tuple[str, int, str | None]:
    """Return status, exit code and reason of a job that left nothing but its process's end."""
    if returncode is None:
        return Status.DIED, 1, "its process ended without a summary"
    if returncode == 0:
        return Status.COMPLETED, 0, None
    signum = -returncode if returncode < 0 else returncode - 128
    if signum in INTERRUPTIONS:
        why = f"interrupted by {signal_name(signum)} before it had begun"
        return Status.INTERRUPTED, 128 + signum, why
    if returncode < 0:
        return (Status.DIED, 1, f"its process was killed by {signal_name(signum)}")
    why = f"its process ended with exit code {returncode} and without a summary"
    return Status.DIED, returncode, why


def read_rows(sweep_folder: Path, sweep: str) -> list[SweepJob]:
    """Return the rows of the jobs of this launch of a sweep. The folder may hold others."""
    rows = map(read_row, job_folders(sweep_folder))
    return [row for row in rows if row is not None and row.sweep == sweep]


def exit_code_of(rows: Sequence[SweepJob]) -> int:
    """Return the code of the first job that failed by itself, or else of the first stopped job."""
    failed = sorted(rows, key=lambda row: row.status == Status.INTERRUPTED)
    return next((row.exit_code for row in failed if row.exit_code), 0)


def link_outside(folder: Path, job: int, sweep_folder: Path) -> None:
    """Leave a link in a sweep's folder to a job's run folder that lies elsewhere.

    ``hydra.sweep.subdir`` may lead out of the folder, in which the jobs are looked for.
    """
    if folder.resolve().is_relative_to(sweep_folder.resolve()):
        return
    try:
        with replacing(sweep_folder / f"{_LINK}{job}") as link:
            link.symlink_to(folder.resolve(), target_is_directory=True)
    except OSError as error:
        log.warning(
            "job %d is missing in the sweep's table: no link to %s in %s: %s",
            job,
            folder,
            sweep_folder,
            error.strerror,
        )


def job_folders(sweep_folder: Path) -> Iterator[Path]:
    """Yield every run folder of a sweep. ``hydra.sweep.subdir`` may have several levels, and lead
    out of it."""
    for link in sorted(sweep_folder.glob(f"{_LINK}*")):
        if link.is_symlink() and (link / JOB_FILE).exists():
            yield link.resolve()
    for folder, names, files in os.walk(sweep_folder):
        if ".hydra" in names or JOB_FILE in files:
            names.clear()  # no job lies inside another
            yield Path(folder)
        else:
            names[:] = sorted(name for name in names if not name.startswith("."))


@dataclass(frozen=True)
class SweepTable:
    """The content of ``sweep.json``. A running sweep has no rows yet."""

    sweep: str
    launcher: str
    status: str = Status.RUNNING
    exit_code: int | None = None
    wall_seconds: float | None = None
    jobs: tuple[SweepJob, ...] = ()
    schema: int = SCHEMA
    # a shell command, for any working directory
    resume_command: str | None = None
    # The overrides of the command.
    overrides: tuple[str, ...] = ()
    direction: str = MAXIMIZE  # or MINIMIZE: which result is best
    repeat: int = 1  # jobs of each point, which differ in their seeds

    @property
    def sign(self) -> int:
        """1 if the largest result is the best, -1 if the smallest is."""
        return -1 if self.direction == MINIMIZE else 1

    @property
    def best_is(self) -> str:
        """Which result is the best, in a word."""
        return "largest" if self.sign > 0 else "smallest"

    def write(self, folder: Path) -> None:
        """Write ``sweep.json``. Raises OSError if that is not possible."""
        content = {**vars(self), "jobs": [row.as_json() for row in self.jobs]}
        write_json(folder / SWEEP_FILE, content, indent=2)


def read_table(folder: Path) -> SweepTable | None:
    """Return the table in a sweep folder, or None if it cannot be read."""
    with contextlib.suppress(MalformedEventError):
        return from_json(SweepTable, read_object(folder / SWEEP_FILE))
    return None


def is_anothers(sweep_folder: Path, sweep: str) -> bool:
    """Return whether another sweep has started in a folder that was removed while the sweep with
    this id ran. Code that writes into the folder calls this first."""
    table = read_table(sweep_folder)
    return bool(sweep) and table is not None and table.sweep != sweep


def storage_in(folder: Path) -> JournalStorage:
    """Return the storage of the study in ``folder``. It takes no extra lock, because a sweep has a
    single launcher, and Optuna breaks its lock after 30 s."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    class NoLock(JournalFileOpenLock):
        def acquire(self) -> bool:
            return True

        def release(self) -> None:
            pass

    path = str(folder / STUDY_FILE)
    return JournalStorage(JournalFileBackend(path, lock_obj=NoLock(path)))
