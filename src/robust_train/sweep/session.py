"""What Hydra runs in this process: a job, or a sweep and its jobs; and how it ends.

There is one :data:`session`, because Hydra itself makes the callback and calls the task.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import shutil
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from robust_train.compat import returned_or_raised
from robust_train.config.attempt import CODE
from robust_train.config.checks import hide_urls, unchecked
from robust_train.files import plain, set_aside
from robust_train.folder.lock import (
    RunLock,
    is_held,
    read_holder,
    refusal,
    wait_until_free,
)
from robust_train.folder.provenance import (
    public_command,
    repeated_with,
    sweep_resume_command,
)
from robust_train.folder.requests import MAX_JOBS_FILE, sweep_stop_requested
from robust_train.folder.state import read_summary
from robust_train.host.engine import guest_rank
from robust_train.host.signals import SignalWatch
from robust_train.launcher import detach
from robust_train.launcher.hydra_state import OF_HYDRA, close_to_others, sweep_folder
from robust_train.launcher.notifier import Notifier, notifications
from robust_train.model.errors import EXIT_FAILED, ConfigError
from robust_train.readable import duration, named_line
from robust_train.sweep import plugins_of_others as others
from robust_train.sweep.checks import check_jobs
from robust_train.sweep.page import write_sweep_report
from robust_train.sweep.points import others_work
from robust_train.sweep.record import (
    COMPLETED,
    DIED,
    ENDED,
    INTERRUPTED,
    NOT_STARTED,
    OF_THE_SWEEP,
    PRUNED,
    RUNNING,
    STARTED,
    SWEEP_FILE,
    JobStart,
    SweepJob,
    SweepTable,
    as_csv,
    best_first,
    decide,
    exit_code_of,
    has_failed,
    point_table,
    read_record,
    read_rows,
    read_table,
    row_of,
    screen_table,
    tally,
)

log = logging.getLogger("robust_train")

SWEEP_VARIABLE = "ROBUST_TRAIN_SWEEP"
"""The id of this launch of a sweep, for the processes that launchers start for its jobs."""


@dataclass
class CurrentJob:
    """A job that Hydra has entered.

    Attributes:
        folder: its run folder.
        record: its record; None if it is not one of a sweep.
        runs: whether it is to be run; otherwise its objective is known.
        refusal: why it must not be run.
    """

    folder: Path
    record: SweepJob | None = None
    runs: bool = True
    refusal: str | None = None

    @property
    def objective(self) -> Any:
        """The sweeper's value of a job that is not run."""
        if self.record is not None and self.record.reused:
            return self.record.result
        return math.nan

    def ended(
        self,
        status: str,
        exit_code: int,
        **more: Any,
    ) -> None:
        """Record the job's end, with its ``reason`` or ``result``. The first call counts."""
        if self.record is not None and self.record.status == STARTED:
            self.write(
                replace(
                    self.record,
                    status=status,
                    exit_code=exit_code,
                    **more,
                )
            )

    def write(self, record: SweepJob) -> None:
        """Keep the job's record and write it."""
        self.record = record
        try:
            record.write(self.folder)
        except OSError as error:
            log.warning(
                "cannot write to %s: %s",
                self.folder,
                error.strerror,
            )


@dataclass
class Sweep:
    """A sweep that runs."""

    table: SweepTable  # the content of ``sweep.json`` while it runs
    folder: Path
    # of the folder; the jobs of `gpu_queue`, which are forks, hold it as well. None: another
    # launcher, which began the sweep, has it and writes the table
    lock: RunLock | None
    notifier: Notifier
    # jobs that our launcher knows of, by number
    planned: dict[int, SweepJob] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    pid: int = field(default_factory=os.getpid)

    def take_over(self) -> bool:
        """Return whether the sweep's table is this launcher's, which may have become the last."""
        if self.lock is None and not is_held(self.folder):
            with contextlib.suppress(ConfigError, OSError):
                self.lock = RunLock(self.folder, self.table.sweep)
                self.table.write(self.folder)
        return self.lock is not None

    def rows(self) -> list[SweepJob]:
        """Return the jobs so far, by number, with known ones that have not started."""
        rows = [_alive(row) for row in read_rows(self.folder, self.table.sweep)]
        seen = {row.job for row in rows}
        for number, record in self.planned.items():
            if number not in seen:
                rows.append(row_of(None, record, None))
        return sorted(rows, key=lambda row: row.sort_key)


@dataclass
class HydraSession:
    """What this process runs, one thing at a time, and how it ends.

    Attributes:
        sweep: the sweep that runs.
        job: the job that Hydra has entered; None without our callback.
        exit_code: that of the first job that did not complete, else 0.
        sets_exit_code: whether a command of ours ends the process with ``exit_code``.
        check: raises ConfigError if a job must not start.
    """

    sweep: Sweep | None = None
    job: CurrentJob | None = None
    exit_code: int = 0
    sets_exit_code: bool = False
    check: Callable[[DictConfig], None] | None = None
    _refusals: set[str] = field(default_factory=set)

    def note(self, exit_code: int) -> None:
        """Record the exit code of a job."""
        self.exit_code = self.exit_code or exit_code

    def job_ended(
        self,
        status: str,
        exit_code: int,
        reason: str | None,
    ) -> None:
        """Record the end of the job that Hydra has entered, if it did not complete."""
        self.note(exit_code)
        if self.job is not None:
            self.job.ended(
                status,
                exit_code,
                reason=reason,
            )

    def refuse(self, error: ConfigError) -> None:
        """Print why a job was refused, once for the jobs of a sweep that share the mistake."""
        message = str(error)
        if message not in self._refusals:
            self._refusals.add(message)
            print(message, file=sys.stderr)

    def begin(self, config: DictConfig) -> None:
        """Begin a sweep, before its first job: lock its folder and write ``sweep.json``.

        Raises:
            ConfigError: a live sweep holds the folder, or it would be a job's too; nothing was
                written.
            OSError: the sweep folder cannot be made.
        """
        self.finish()  # an earlier sweep of this process that an error has ended
        subdir: Any = OmegaConf.to_container(config.hydra.sweep)
        if os.path.normpath(str(subdir["subdir"])) == ".":
            raise ConfigError(
                f"hydra.sweep.subdir={subdir['subdir']}: a job needs a run folder of its own "
                "inside the sweep's, as by hydra.sweep.subdir='${hydra.job.num}'"
            )
        folder = Path(str(config.hydra.sweep.dir)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        close_to_others(folder, group_reads=unchecked(config).group_reads_runs)
        launcher = str(config.hydra.runtime.choices.get("hydra/launcher"))
        given = map(str, config.hydra.overrides.task)
        overrides = tuple(
            public_command([o for o in given if not OF_THE_SWEEP.match(o)])
        )
        id_, lock = _lock_or_join(folder, overrides if _can_share(config) else None)
        ours = config.hydra.sweeper if _is_ours(config) else {}
        table = SweepTable(
            id_,
            launcher,
            resume_command=sweep_resume_command(folder, str(config.hydra.runtime.cwd)),
            overrides=overrides,
            direction=ours.get("direction", "maximize"),
            repeat=ours.get("repeat", 1),
        )
        notifier = Notifier(notifications(unchecked(config).notify, os.environ))
        if lock is not None:  # what an earlier launch was asked for
            (folder / MAX_JOBS_FILE).unlink(missing_ok=True)
        if lock is not None and (folder / CODE).exists():
            log.info("jobs that start from here on run today's code")
            shutil.rmtree(folder / CODE, ignore_errors=True)
        os.environ[SWEEP_VARIABLE] = id_
        others.remember_mask(os.environ)
        if lock is not None:
            table.write(folder)
        self.sweep, self.exit_code = Sweep(table, folder, lock, notifier), 0
        detach.has_begun(folder, detach.sweep_text(folder))
        # a project with a command of its own gets its table also when a job's error ends the sweep
        atexit.register(self.finish)

    def finish(self) -> int:
        """Show the table and write the files, once; return the exit code that the jobs ask for.
        Safe to call again, and where there was no sweep."""
        sweep, self.sweep = self.sweep, None
        if sweep is not None and sweep.pid == os.getpid():
            try:
                self._show_and_write(sweep)
            finally:
                if sweep.lock is not None:
                    sweep.lock.release()
                signals = SignalWatch()
                with signals, signals.handed_to(lambda signum: sweep.notifier.hurry()):
                    sweep.notifier.finish()
        return self.exit_code

    def _show_and_write(self, sweep: Sweep) -> None:
        rows, folder = sweep.rows(), sweep.folder
        if all(row.status == NOT_STARTED for row in rows):
            with contextlib.suppress(OSError):
                if sweep.lock is not None and not others_work(folder):
                    (folder / SWEEP_FILE).unlink()
            return
        code = exit_code_of(rows)
        self.note(code)
        seconds = time.monotonic() - sweep.started
        wall = round(seconds, 3)
        table = replace(
            sweep.table,
            status=RUNNING if others_work(folder) else ENDED,
            exit_code=code,
            wall_seconds=wall,
            jobs=tuple(rows),
        )
        ended = f"{tally(rows)} in {duration(seconds)}"
        if sweep.take_over():
            try:
                table.write(folder)
                (folder / "sweep.csv").write_text(as_csv(rows), encoding="utf-8")
            except OSError as error:
                log.warning(
                    "cannot write a table to %s: %s",
                    folder,
                    error.strerror,
                )
            write_sweep_report(folder)
            _notify(sweep, rows, code, ended)
        # not through logging: after an interruption that may still write into a job's log file
        with contextlib.suppress(OSError, ValueError):
            points = best_first(table)
            shown = [row for point in points for row in point.rows]
            text = screen_table([*shown, *(row for row in rows if row.job is None)])
            if table.repeat > 1:
                text = f"{text}\n{point_table(points)}"
            print(f"sweep:\n{text}\n{ended}\nsweep folder: {folder}")
            if code:
                how = f"robust-train resume {folder}"
                if table.resume_command is None:
                    how = repeated_with(f"hydra.sweep.dir={folder}")
                print(f"to go on: {how}")
            sys.stdout.flush()


session = HydraSession()


def _alive(row: SweepJob) -> SweepJob:
    """Return the row of a job that another launcher runs as such: it has no end so far."""
    if row.status != DIED or row.folder is None or not is_held(Path(row.folder)):
        return row
    return replace(
        row,
        status=RUNNING,
        exit_code=None,
        reason=None,
    )


def _can_share(config: DictConfig) -> bool:
    """Return whether a second launcher of the sweep gives its jobs the same numbers."""
    is_basic = str(config.hydra.sweeper.get("_target_")).endswith(".BasicSweeper")
    launcher = config.hydra.runtime.choices.get("hydra/launcher")
    return _is_ours(config) or (is_basic and launcher == "gpu_queue")


def _is_ours(config: DictConfig) -> bool:
    return str(config.hydra.sweeper.get("_target_")).endswith(".RobustSweeper")


def _lock_or_join(
    folder: Path,
    overrides: tuple[str, ...] | None,
    *,
    is_again: bool = False,
) -> tuple[str, RunLock | None]:
    """Return the id of a sweep that begins and its folder's lock; only the id where a live sweep
    with the same overrides is joined. Without ``overrides`` it cannot be shared.

    Raises:
        ConfigError: another sweep holds the folder.
    """
    table, holder = read_table(folder), read_holder(folder)
    is_shared = table is not None and table.overrides == overrides
    if table and holder and is_shared and not holder.is_dead and is_held(folder):
        log.info(
            "joining the sweep that %s runs on %s",
            holder.user,
            holder.host,
        )
        return table.sweep, None
    id_ = uuid.uuid4().hex
    try:
        return id_, RunLock(folder, id_)
    except ConfigError as error:
        if not is_again:
            # another launcher of a killed one's sweep may have taken it over just now
            return _lock_or_join(
                folder,
                overrides,
                is_again=True,
            )
        if (holder := read_holder(folder)) is None:
            raise
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
        raise type(error)(
            f"sweep folder {folder} is in use by the sweep of {holder.user} on {holder.host}, pid "
            f"{holder.pid}, since {since}; choose another hydra.sweep.dir, or stop that sweep: "
            f"robust-train stop {folder}"
        ) from error


def _notify(
    sweep: Sweep,
    rows: list[SweepJob],
    code: int,
    ended: str,
) -> None:
    """Notify of the sweep's end."""
    stopped = any(row.status in (INTERRUPTED, NOT_STARTED) for row in rows)
    failure = "interrupted" if stopped else "failed"
    host = socket.gethostname()
    jobs = [
        {"job": row.job, "status": row.status, "result": row.result} for row in rows
    ]
    sweep.notifier.send(
        failure if code else "completed",
        f"sweep on {host}: {ended}; {sweep.folder}",
        {
            "sweep": sweep.table.sweep,
            "sweep_folder": str(sweep.folder),
            "exit_code": code,
            "host": host,
            "jobs": jobs,
        },
    )


def identity(config: DictConfig) -> SweepJob:
    """Return the record of a sweep's job that is about to start."""
    job = OmegaConf.select(
        config,
        "hydra.job.num",
        throw_on_missing=False,
    )
    repeat = config.hydra.sweeper.get("repeat", 1) if _is_ours(config) else 1
    return SweepJob(
        job,
        tuple(map(str, config.hydra.overrides.task)),
        os.environ.get(SWEEP_VARIABLE, ""),
        trial=None if job is None else job // repeat,
    )


def plan(config: DictConfig, job: CurrentJob) -> JobStart:
    """Decide what to do with a job of a sweep, and give it its record; one that completed in an
    earlier launch becomes part of this one."""
    own, earlier, summary = (
        identity(config),
        read_record(job.folder),
        read_summary(job.folder),
    )
    known = () if earlier is None else (earlier.status, summary and summary.status)
    status = next((one for one in (PRUNED, COMPLETED) if one in known), None)
    entry = decide(
        earlier,
        completed=status is not None,
        overrides=own.overrides,
        sweep=own.sweep,
        resume=unchecked(config).sweep_resume,
    )
    job.record = own
    if entry is JobStart.REUSE and earlier is not None and status is not None:
        result = earlier.result if summary is None else summary.objective
        job.runs = False
        job.write(
            replace(
                own,
                status=status,
                exit_code=0,
                result=result,
                reason=earlier.reason if summary is None else summary.reason,
                reused=True,
            )
        )
        log.info(
            "job %s %s in an earlier launch of this sweep and is not run again "
            "(sweep_resume=true)",
            own.job,
            status,
        )
    return entry


def enter(config: DictConfig, launcher: str | None) -> CurrentJob:
    """Decide whether a job that Hydra enters runs, and prepare its folder."""
    in_sweep = config.hydra.mode == RunMode.MULTIRUN
    job = CurrentJob(Path(str(config.hydra.runtime.output_dir)))
    job.refusal = others.misplaced_launcher(
        str(config.hydra.runtime.choices.get("hydra/launcher")),
        launcher if in_sweep else None,
        list(config.hydra.overrides.hydra),
        in_sweep=in_sweep,
    )
    if in_sweep:
        job.refusal = job.refusal or refusal(job.folder)
        if job.refusal is None:  # otherwise what a live job has there is left alone
            _enter_sweep(job, config)
    return job


def _enter_sweep(job: CurrentJob, config: DictConfig) -> None:
    entry = plan(config, job)
    if entry is JobStart.REUSE:
        return
    assert job.record is not None
    try:
        aside = set_aside(job.folder, OF_HYDRA) if entry is JobStart.AFRESH else None
        if aside is not None:
            log.info("what an earlier job left in this run folder is now in %s", aside)
        # else a job that dies early would seem to have ended as the one before it
        (job.folder / "summary.json").unlink(missing_ok=True)
    except OSError as error:
        # not run over it: a checkpoint of another job must not be mistaken for this one's
        job.refusal = f"{job.folder}: cannot move aside what it holds: {error.strerror}"
        return
    folder = sweep_folder()
    assert folder is not None
    reason = None
    if unchecked(config).sweep_fail_fast and has_failed(folder, job.record.sweep):
        reason = "another job failed before (sweep_fail_fast=true)"
    elif sweep_stop_requested(folder):
        reason = "the sweep was stopped"
    if reason is None:
        job.write(job.record)
    else:
        job.runs = False
        job.ended(NOT_STARTED, 0, reason=reason)
        log.info(
            "job %s is not started: %s",
            job.record.job,
            reason,
        )


class SweepCallback(Callback):
    """Records a sweep, whichever launcher runs its jobs. Instantiated by Hydra from
    ``hydra.callbacks``; pickled into the jobs' processes."""

    def __init__(self) -> None:
        self._launcher: str | None = None

    def on_run_start(
        self,
        config: DictConfig,
        **kwargs: Any,
    ) -> None:
        """Check the job before anything is written to its run folder."""
        hide_urls(config)
        guest = guest_rank(os.environ)
        try:
            if guest is None or guest.rank == 0:  # the other ranks find its lock
                wait_until_free(Path(str(config.hydra.run.dir)))
            if session.check is not None:
                session.check(config)
        except ConfigError as error:
            _end(error)
        if detach.is_due(unchecked(config)):
            raise SystemExit(detach.start())

    def on_multirun_start(
        self,
        config: DictConfig,
        **kwargs: Any,
    ) -> None:
        """Begin the sweep, before the launcher is made."""
        hide_urls(config)
        self._launcher = str(config.hydra.runtime.choices.get("hydra/launcher"))
        try:
            if not detach.is_detached:
                check_jobs(config, session.check)
            if detach.is_due(unchecked(config)):
                raise SystemExit(detach.start())
            # Hydra fails at the same, with a message
            with contextlib.suppress(OSError):
                session.begin(config)
        except ConfigError as error:
            _end(error)
        except Exception:
            # Hydra would warn, and run a sweep of which there is no record
            traceback.print_exc()
            raise SystemExit(EXIT_FAILED) from None

    def on_job_start(
        self,
        config: DictConfig,
        **kwargs: Any,
    ) -> None:
        """Enter the job, in its own process, once its run folder is there."""
        others.restore_mask(os.environ)
        if hide_urls(config):  # of a project's file: Hydra has just written its value
            folder = Path(str(config.hydra.runtime.output_dir))
            file = folder / str(config.hydra.output_subdir) / "config.yaml"
            with contextlib.suppress(OSError):
                cfg = OmegaConf.load(file)
                OmegaConf.update(cfg, "notify.urls", None)
                OmegaConf.save(cfg, file)
        session.job = enter(config, self._launcher)

    def on_job_end(
        self,
        config: DictConfig,
        job_return: JobReturn,
        **kwargs: Any,
    ) -> None:
        """Record the end of the job's function, unless it was interrupted."""
        job, session.job = session.job, None
        if job is None:
            return
        if job_return.status is JobStatus.COMPLETED:
            job.ended(
                COMPLETED,
                0,
                result=plain(job_return.return_value),
            )
        else:
            job.ended(
                "failed",
                1,
                reason=named_line(returned_or_raised(job_return)),
            )

    def on_multirun_end(
        self,
        config: DictConfig,
        **kwargs: Any,
    ) -> None:
        """Finish the sweep after its last job, unless a job's error has ended it."""
        code = session.finish()
        if code and not session.sets_exit_code:
            # not an Exception: those of callbacks are turned into warnings
            raise SystemExit(code)


def _end(error: ConfigError) -> NoReturn:
    print(error, file=sys.stderr)
    # not an Exception: those of callbacks are turned into warnings
    raise SystemExit(error.exit_code)
