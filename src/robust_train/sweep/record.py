"""Reads and writes a sweep on disk: ``sweep_job.json`` of each job, and ``sweep.json`` of all.

`sweep.session` and `sweep.gpu_queue` write both in the processes of the sweep and of its jobs. The
screen, the commands and a later launch of the sweep read them. A job's file only has what the run
folder does not say. `build_row` adds the rest from the folder, whichever launcher ran the job.
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
STUDY_FILE = "study.jsonl"  # Optuna's trials
STUDY = "sweep"  # the study's name in that file
_LINK = "job-"  # A link to a run folder outside the sweep's. The job's number follows.
INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Overrides that decide how jobs are run, and not what they compute.
_RUN_OVERRIDE = re.compile(
    r"\+{0,2}(robust\.)?(sweep_(direction|fail_fast|patience)|resume|detach|notify\.\w+|"
    r"queue_priority|wait_for_gpu|gpu_wait_timeout_minutes|max_launches|max_retries|"
    r"stall_timeout_minutes)="
)


def select_job_overrides(overrides: Iterable[str]) -> list[str]:
    """Return the overrides that decide what a job computes, and not only how it is run."""
    return [override for override in overrides if not _RUN_OVERRIDE.match(override)]


class Status:
    """The status of a job of a sweep, or of a sweep.

    A running job may also have the name of its state as its status, such as ``training``.
    """

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
    """One job of a sweep, a row of ``sweep.json``. None means unknown or absent."""

    job: int  # the job's number
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
    wait_seconds: float | None = None  # the part of `wall_seconds` spent waiting for a GPU
    reused: bool = False  # completed in an earlier launch of the sweep
    # A sentence about the end. A completed job has a reason only if its end is in doubt.
    reason: str | None = None
    folder: str | None = None  # the run folder, None before the job starts
    # The number of the combination of values. With repeat=3, three jobs share it.
    trial: int | None = None

    @property
    def path(self) -> Path:
        """The run folder of a job that has started."""
        return Path(self.folder or "")

    @property
    def is_running(self) -> bool:
        """Whether the job has started and not ended."""
        return self.exit_code is None and self.status != Status.NOT_STARTED

    @property
    def has_completed(self) -> bool:
        """Whether the job ran to its end. Only such a job has a result."""
        return self.status == Status.COMPLETED

    @property
    def is_pruned(self) -> bool:
        """Whether the sweep stopped the job early. A pruned job is over and has no result."""
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
        """The reason for the job's end, or why the result of a completed job has no rank."""
        if self.reason or not self.has_completed or self.value is not None:
            return self.reason
        result = self.result
        problem = "not a number"
        # NaN is the only number that differs from itself. `math.isnan` would raise for an integer
        # that is too large for a float.
        is_nan = result != result
        if isinstance(result, (int, float)) and not is_nan:
            problem = "not finite"
        return f"its result is {problem}: {shorten(repr(result), 100)}"

    def computes_same_as(self, other: SweepJob) -> bool:
        """Return whether both jobs have the same overrides, in any order.

        Overrides that only decide how a job is run do not count.
        """
        overrides = select_job_overrides(self.overrides)
        other_overrides = select_job_overrides(other.overrides)
        return sorted(overrides) == sorted(other_overrides)

    def as_refused(self, reason: str) -> SweepJob:
        """Return the job marked as refused."""
        return replace(self, status=Status.REFUSED, exit_code=EXIT_BAD_CONFIG, reason=reason)

    def write(self, folder: Path) -> None:
        """Write the record into the run folder, atomically. A full disk only costs a warning."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            content = {"schema": 2, **vars(self), **lacked_by_json(self.result)}
            write_json(folder / JOB_FILE, content, indent=2)
        except OSError as error:
            log.warning("cannot write to %s: %s", folder, error.strerror)

    def as_row(self) -> dict[str, Json]:
        """Return the fields without the sweep's id, which the table has once for all jobs."""
        row = {**vars(self), "reason": self.why}
        del row["sweep"]
        return row

    def as_json(self) -> dict[str, Json]:
        """Return the fields for ``sweep.json``."""
        return self.as_row() | lacked_by_json(self.result)

    @classmethod
    def parse(cls, content: Any) -> SweepJob:
        """Return the job in a file's content.

        Raises:
            MalformedEventError: the content is not a job.
        """
        return from_json(cls, with_lacked_by_json(content))


def start_record(job: SweepJob, earlier: SweepJob | None, *, resume: bool) -> tuple[SweepJob, bool]:
    """Decide whether a job that is about to start continues the job that ran in its folder.

    Args:
        job: the job that is about to start.
        earlier: the record in its run folder, None without one.
        resume: whether the user resumes an earlier launch of the sweep.

    Returns:
        The job's record, and whether the folder's content belongs to the job. If the earlier job
        is over, the record is the earlier one, as part of this launch.
    """
    if earlier is None:
        return job, resume
    # Within a launch, Slurm may have put the job back into its queue, so it resumes in any case.
    is_same_launch = earlier.sweep == job.sweep
    continues = job.computes_same_as(earlier) and (resume or is_same_launch)
    is_over = earlier.has_completed or earlier.is_pruned
    if not continues or not is_over:
        return job, continues
    reused = replace(
        earlier, job=job.job, overrides=job.overrides, sweep=job.sweep, trial=job.trial, reused=True
    )
    return reused, True


def read_record(folder: Path) -> SweepJob | None:
    """Return the record in a run folder, or None if it cannot be read."""
    with contextlib.suppress(MalformedEventError):
        return SweepJob.parse(read_object(folder / JOB_FILE))
    return None


def read_row(folder: Path) -> SweepJob | None:
    """Return the current state of the job in ``folder``, None if its record cannot be read."""
    record = read_record(folder)
    if record is None:
        return None
    return build_row(record, folder)


def build_row(job: SweepJob, folder: Path, returncode: int | None = None) -> SweepJob:
    """Return the current state of a job, from its record and its run folder.

    Args:
        job: the job's record.
        folder: its run folder.
        returncode: the exit code of the job's process, None if the process may still run.
    """
    summary = read_summary(folder)
    attempts = tuple[Attempt, ...]()
    state = read_state(folder)
    has_ended = state is None or state.is_final
    job = replace(job, folder=str(folder))
    if summary is not None:
        attempts = summary.attempts
        job = replace(job, wall_seconds=summary.wall_seconds, wait_seconds=summary.wait_seconds)
    if job.status != Status.STARTED:
        pass  # The job's own process has recorded its end.
    elif summary is not None:
        status = summary.status
        result = summary.objective if status == Status.COMPLETED else None
        exit_code = EXIT_CODES.get(status, 143)  # An interrupted job has no code of its own there.
        job = replace(job, status=status, exit_code=exit_code, reason=summary.reason, result=result)
    elif returncode is None and is_alive(folder, has_ended=has_ended):
        job = replace(job, status=Status.RUNNING)
        if state is not None and not state.is_final:
            job = replace(job, status=state.state)
            if state.attempt is not None:
                attempts = (state.attempt,)
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
    """Return status, exit code and reason of a job that left no summary.

    ``returncode`` is the exit code of its process, None if it is unknown.
    """
    if returncode is None:
        return Status.DIED, 1, "its process ended without a summary"
    if returncode == 0:
        return Status.COMPLETED, 0, None
    signum = -returncode if returncode < 0 else returncode - 128
    if signum in INTERRUPTIONS:
        reason = f"interrupted by {signal_name(signum)} before it started"
        return Status.INTERRUPTED, 128 + signum, reason
    if returncode < 0:
        return Status.DIED, 1, f"its process was killed by {signal_name(signum)}"
    reason = f"its process ended with exit code {returncode} and without a summary"
    return Status.DIED, returncode, reason


def read_rows(sweep_folder: Path, sweep: str) -> list[SweepJob]:
    """Return the jobs of one launch of a sweep. The folder may have jobs of other launches."""
    rows = []
    for folder in job_folders(sweep_folder):
        row = read_row(folder)
        if row is not None and row.sweep == sweep:
            rows.append(row)
    return rows


def exit_code_of(rows: Sequence[SweepJob]) -> int:
    """Return the exit code of the first job that failed, or else of the first interrupted job."""
    code_of_interrupted = 0
    for row in rows:
        if not row.exit_code:
            continue
        if row.status != Status.INTERRUPTED:
            return row.exit_code
        code_of_interrupted = code_of_interrupted or row.exit_code
    return code_of_interrupted


def link_outside(folder: Path, job: int, sweep_folder: Path) -> None:
    """Create a link in a sweep's folder to a run folder outside of it.

    ``hydra.sweep.subdir`` may lead out of the sweep's folder. `job_folders` follows the link.
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
    """Yield every run folder of a sweep.

    With ``hydra.sweep.subdir``, run folders may be several levels below the sweep's folder, or
    outside of it.
    """
    for link in sorted(sweep_folder.glob(f"{_LINK}*")):
        if link.is_symlink() and (link / JOB_FILE).exists():
            yield link.resolve()
    for folder, names, files in os.walk(sweep_folder):
        if ".hydra" in names or JOB_FILE in files:
            names.clear()  # A run folder contains no other run folder.
            yield Path(folder)
        else:
            names[:] = sorted(name for name in names if not name.startswith("."))


@dataclass(frozen=True)
class SweepTable:
    """The content of ``sweep.json``. While the sweep runs, it has no jobs."""

    sweep: str
    launcher: str
    status: str = Status.RUNNING
    exit_code: int | None = None
    wall_seconds: float | None = None
    jobs: tuple[SweepJob, ...] = ()
    schema: int = SCHEMA
    resume_command: str | None = None  # works in any working directory
    overrides: tuple[str, ...] = ()  # of the user's command
    direction: str = MAXIMIZE  # which result is best
    repeat: int = 1  # the jobs of each combination of values, which differ in their seeds

    @property
    def sign(self) -> int:
        """1 if the largest result is the best, -1 if the smallest is."""
        return -1 if self.direction == MINIMIZE else 1

    @property
    def best_is(self) -> str:
        """Which result is the best: ``largest`` or ``smallest``."""
        return "largest" if self.sign > 0 else "smallest"

    def write(self, folder: Path) -> None:
        """Write ``sweep.json``.

        Raises:
            OSError: the file cannot be written.
        """
        content = {**vars(self), "jobs": [row.as_json() for row in self.jobs]}
        write_json(folder / SWEEP_FILE, content, indent=2)


def read_table(folder: Path) -> SweepTable | None:
    """Return the table in a sweep folder, or None if it cannot be read."""
    with contextlib.suppress(MalformedEventError):
        return from_json(SweepTable, read_object(folder / SWEEP_FILE))
    return None


def is_taken_over(sweep_folder: Path, sweep: str) -> bool:
    """Return whether another sweep has started in the folder of the sweep with this id.

    That happens if the folder is removed while the sweep runs. Code that writes into the folder
    calls this first.
    """
    table = read_table(sweep_folder)
    return bool(sweep) and table is not None and table.sweep != sweep


def storage_in(folder: Path) -> JournalStorage:
    """Return the storage of the search in a sweep's folder.

    It has no lock. The sweep's own lock already excludes other writers, and Optuna would break its
    lock after 30 s.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    class NoLock(JournalFileOpenLock):
        def acquire(self) -> bool:
            return True

        def release(self) -> None:
            pass

    path = str(folder / STUDY_FILE)
    return JournalStorage(JournalFileBackend(path, lock_obj=NoLock(path)))
