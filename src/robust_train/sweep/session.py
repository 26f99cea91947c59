"""The job, or the sweep with its jobs, that Hydra runs in this process, and its end.

Hydra creates :class:`SweepCallback` and calls it in this order. ``on_multirun_start`` begins a
sweep in the sweep's process. ``on_job_start`` and ``on_job_end`` record each job in the process
that runs it: the sweep's, a fork of it, or one that joblib or submitit started. ``on_multirun_end``
shows the table and sets the exit code. Without a sweep, ``on_run_start`` comes first instead.

All share the process's only `session`, because Hydra creates the callback and calls the task.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import shlex
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from robust_train.children import detach
from robust_train.children.notifier import Notifier, notify_settings
from robust_train.compat import unwrap_job_return
from robust_train.config.checks import hide_urls, unchecked
from robust_train.config.projects import their_keys
from robust_train.config.schema import RobustConfig
from robust_train.config.words import Words
from robust_train.files import set_aside, to_plain
from robust_train.folder.hydra_state import OF_HYDRA, close_to_others, composed_files
from robust_train.folder.lock import RunLock, refusal, wait_until_free
from robust_train.folder.provenance import changed_files, config_digests, read_environment
from robust_train.folder.requests import (
    SWEEP_FILE,
    SWEEP_LIMIT_FILE,
    RefusedError,
    request_sweep_stop,
    sweep_stop_requested,
)
from robust_train.folder.resume_command import repeated_with, sweep_resume_command
from robust_train.folder.secrets import public_command
from robust_train.folder.state import note_ended_earlier
from robust_train.host.engine import guest_rank
from robust_train.host.job_logging import shorten_lines
from robust_train.host.loggers import standard_error
from robust_train.host.signals import SignalWatch
from robust_train.model.errors import EXIT_FAILED, ConfigError
from robust_train.readable import duration, named_line, one_line
from robust_train.report.html import save
from robust_train.sweep.checks import (
    check_jobs,
    direction_of,
    launcher_of,
    misplaced_launcher,
    speak_of_keys_in,
)
from robust_train.sweep.page import write_sweep_report
from robust_train.sweep.record import (
    Status,
    SweepJob,
    SweepTable,
    begun,
    exit_code_of,
    is_anothers,
    job_folders,
    link_outside,
    of_jobs,
    read_row,
    read_rows,
)
from robust_train.sweep.table import (
    as_csv,
    best_first,
    point_table,
    screen_table,
    tally,
    title,
    unranked,
)

log = logging.getLogger("robust_train")

SWEEP_VARIABLE = "ROBUST_TRAIN_SWEEP"
"""The id of this launch of a sweep, for the processes that launchers start for its jobs."""
LOST = (
    "%s: this sweep folder was removed, and another sweep has begun there; this sweep starts no "
    "more jobs and writes nothing more there"
)
_OWN_MASK = "ROBUST_TRAIN_SWEEP_MASK"
_MASK = "CUDA_VISIBLE_DEVICES"


@dataclass
class Sweep:
    """A sweep that runs."""

    table: SweepTable  # the content of ``sweep.json`` while it runs
    folder: Path
    # The folder's lock. The jobs of `gpu_queue`, which are forks, hold it too.
    lock: RunLock
    notifier: Notifier
    # jobs that our launcher knows of, by number
    known: dict[int, SweepJob] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    pid: int = field(default_factory=os.getpid)

    def rows(self) -> list[SweepJob]:
        """Return the jobs so far, by number, including known jobs that left nothing on disk."""
        recorded = {row.job: row for row in read_rows(self.folder, self.table.sweep)}
        rows = self.known | recorded
        return [rows[number] for number in sorted(rows)]

    def show_and_write(self) -> int:
        """Show the table and write the files, and return the exit code that the jobs ask for."""
        rows = self.rows()
        folder = self.folder
        if is_anothers(folder, self.table.sweep):
            log.error(LOST, folder)
            return exit_code_of(rows) or EXIT_FAILED
        if all(row.status == Status.NOT_STARTED for row in rows):
            # With jobs of an earlier launch, the file stays: it holds the command to resume them.
            if not any(job_folders(folder)):
                with contextlib.suppress(OSError):
                    (folder / SWEEP_FILE).unlink()
            return 0
        code = exit_code_of(rows)
        seconds = time.monotonic() - self.started
        table = replace(
            self.table,
            status=Status.ENDED,
            exit_code=code,
            wall_seconds=round(seconds, 3),
            jobs=tuple(rows),
        )
        ended = f"{tally(rows)} in {duration(seconds)}"
        try:
            table.write(folder)
            save(folder / "sweep.csv", as_csv(rows))
        except OSError as error:
            log.warning("cannot write a table to %s: %s", folder, error.strerror)
        write_sweep_report(folder)
        self._notify(table, ended)
        points = best_first(table)
        lines = [title(table)]
        lines += screen_table([row for rows in points for row in rows])
        if table.repeat > 1:
            lines += point_table(points)
        lines += [*unranked(rows), ended, f"sweep folder: {folder}"]
        if code:
            how = f"robust-train resume {shlex.quote(str(folder))}"
            if table.resume_command is None:
                how = repeated_with(f"hydra.sweep.dir={folder}")
            lines.append(f"to continue: {how}")
        # not through logging: after an interruption that may still write into a job's log file
        with contextlib.suppress(OSError, ValueError):
            print("\n".join(map(one_line, lines)), flush=True)
        return code

    def _notify(self, table: SweepTable, ended: str) -> None:
        stopped = any(row.status in (Status.INTERRUPTED, Status.NOT_STARTED) for row in table.jobs)
        failure = "interrupted" if stopped else "failed"
        host = socket.gethostname()
        self.notifier.send(
            failure if table.exit_code else "completed",
            f"sweep on {host}: {ended}; {self.folder}",
            {
                "sweep": table.sweep,
                "sweep_folder": str(self.folder),
                "exit_code": table.exit_code,
                "host": host,
                # not its overrides, which may hold a secret
                "jobs": [
                    {"job": r.job, "status": r.status, "result": r.result} for r in table.jobs
                ],
            },
        )


@dataclass
class HydraSession:
    """The job or sweep that this process runs, one at a time, and its end."""

    sweep: Sweep | None = None  # the sweep that runs
    job: SweepJob | None = None  # that of a sweep, or one that is refused
    exit_code: int = 0  # that of the first job that did not complete, else 0
    sets_exit_code: bool = False  # a command of ours ends the process with it
    # raises ConfigError if a job must not start
    check: Callable[[DictConfig], None] | None = None
    # what the user typed; Hydra is given more
    arguments: list[str] | None = None
    sweep_folder: Path = Path()  # the job's sweep folder
    _refusals: set[str] = field(default_factory=set)

    def restore_arguments(self) -> None:
        """Make the command line the user's again, which their code may read: Hydra has read it."""
        if self.arguments is not None:
            sys.argv[1:] = self.arguments

    def note(self, exit_code: int) -> None:
        """Record the exit code of a job."""
        self.exit_code = self.exit_code or exit_code

    def job_ended(
        self, status: str, exit_code: int, reason: str | None = None, result: Any = None
    ) -> None:
        """Record the end of the job that Hydra has entered. The first call counts."""
        self.note(exit_code)
        if self.job is not None and self.job.is_running:
            self.job = replace(
                self.job, status=status, exit_code=exit_code, reason=reason, result=result
            )
            if not is_anothers(self.sweep_folder, self.job.sweep):
                self.job.write(self.job.path)

    def refuse(self, error: ConfigError) -> None:
        """Print why a job was refused, once for the jobs of a sweep that share the mistake."""
        message = str(error)
        if message not in self._refusals:
            self._refusals.add(message)
            print(message, file=standard_error())

    def begin(self, config: DictConfig) -> None:
        """Start a sweep, before its first job: lock its folder and write ``sweep.json``. Raises
        ConfigError if a live sweep holds the folder, or it cannot be used. Then nothing was
        written."""
        # an earlier sweep of this process that an error has ended
        self.finish()
        if not OmegaConf.is_interpolation(config.hydra.sweep, "subdir"):
            raise ConfigError(
                f"hydra.sweep.subdir={config.hydra.sweep.subdir}: each job needs a run folder of "
                "its own inside the sweep's, as by hydra.sweep.subdir='${hydra.job.num}'"
            )
        folder = sweep_folder_of(config).resolve()
        sweeper = config.hydra.sweeper
        given = map(str, config.hydra.overrides.task)
        overrides = tuple(public_command(of_jobs(given)))
        kind = str(sweeper.get("_target_")).rpartition(".")[2]
        is_ours = kind == "RobustSweeper"
        launcher = "gpu_queue" if is_ours else launcher_of(config)
        shorten_lines()
        direction = direction_of(config)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            close_to_others(folder)
            id_ = uuid.uuid4().hex
            lock = RunLock(folder, id_)
            cwd = str(config.hydra.runtime.cwd)
            table = SweepTable(
                id_,
                launcher,
                resume_command=sweep_resume_command(folder, cwd),
                overrides=overrides,
                direction=direction,
                repeat=repeat_of(config),
            )
            # what an earlier launch was asked for
            (folder / SWEEP_LIMIT_FILE).unlink(missing_ok=True)
            table.write(folder)
        except OSError as error:
            raise ConfigError(f"sweep folder {folder}: {error.strerror}") from error
        if launcher != "gpu_queue" and (patience := unchecked(config).sweep_patience):
            log.warning(
                f"sweep_patience={patience}: hydra/launcher={launcher} runs each job to its end; "
                "gpu_queue and our sweepers stop those that are behind"
            )
        os.environ[SWEEP_VARIABLE] = id_
        remember_mask(os.environ)
        notifier = Notifier(notify_settings(unchecked(config).notify, os.environ))
        self.sweep = Sweep(table, folder, lock, notifier)
        self.exit_code = 0
        detach.report_start(folder, detach.sweep_text(folder))
        # a project with a command of its own gets its table also when a job's error ends the sweep
        atexit.register(self.finish)

    def finish(self) -> int:
        """Finish the sweep, once, and return the exit code that follows from the jobs. It may be
        called again, and without a sweep."""
        sweep = self.sweep
        self.sweep = None
        if sweep is not None and sweep.pid == os.getpid():
            signals = SignalWatch()
            # one signal too many must not cost the table; nor, once they are blocked again as an
            # interrupted sweep leaves them, the exit code while the interpreter ends
            with signals, signals.hand_signals_to(lambda signum: sweep.notifier.hurry()):
                try:
                    self.note(sweep.show_and_write())
                finally:
                    sweep.lock.release()
                sweep.notifier.finish()
        return self.exit_code


session = HydraSession()


def sweep_folder_of(config: DictConfig) -> Path:
    """Return the folder of the sweep that a config is of."""
    # relative to where the sweep was started: Hydra may have changed the working directory
    return Path(str(config.hydra.runtime.cwd)) / str(config.hydra.sweep.dir)


def repeat_of(config: DictConfig) -> int:
    """Return how many jobs each point of a sweep has. 1 with other sweepers than ours."""
    return int(config.hydra.sweeper.get("repeat") or 1)


def prepare(config: DictConfig, folder: Path) -> SweepJob:
    """Prepare a folder for a sweep's job that is about to start, and return the job. A job that
    must not run has already ended."""
    job = SweepJob(
        config.hydra.job.num,
        tuple(map(str, config.hydra.overrides.task)),
        os.environ.get(SWEEP_VARIABLE, ""),
        folder=str(folder),
        trial=config.hydra.job.num // repeat_of(config),
    )
    if is_anothers(sweep_folder_of(config), job.sweep):
        return job.refused(LOST % sweep_folder_of(config))
    problem = refusal(folder)
    if problem is not None:
        return job.refused(problem)  # what a live job has there stays
    job, stays = begun(job, read_row(folder), resume=unchecked(config).resume)
    if not job.is_running:
        digests = config_digests(composed_files(config))
        changed = ", ".join(changed_files(read_environment(folder), digests))
        log.log(
            logging.WARNING if changed else logging.INFO,
            "job %s %s in an earlier launch of this sweep and is not run again (resume=true)%s",
            job.job,
            job.status,
            f"; its config has changed since: {changed}" if changed else "",
        )
    else:
        try:
            is_others = not stays and folder.exists()
            if is_others and (aside := set_aside(folder, OF_HYDRA)):
                log.info("what an earlier job left here is now in %s", aside)
            # else a job that dies early would seem to have ended as the one before it
            (folder / "summary.json").unlink(missing_ok=True)
        except OSError as error:
            # not run over it: a checkpoint of another job must not be mistaken for this one's
            return job.refused(f"{folder}: cannot move aside what it holds: {error.strerror}")
        if sweep_stop_requested(sweep_folder_of(config)):
            reason = "the sweep was stopped"
            job = replace(job, status=Status.NOT_STARTED, reason=reason)
            log.info("job %d is not started: %s", job.job, reason)
    job.write(folder)
    link_outside(folder, job.job, sweep_folder_of(config))
    return job


def fail_fast(settings: RobustConfig, job: SweepJob, folder: Path) -> None:
    """Stop the sweep in ``folder`` if a job of it has failed and its user wants that."""
    if settings.sweep_fail_fast and job.exit_code:
        with contextlib.suppress(OSError, RefusedError):
            request_sweep_stop(folder)
            log.info("job %d has ended the sweep: sweep_fail_fast=true", job.job)


class SweepCallback(Callback):
    """Records a sweep, whichever launcher runs its jobs. Hydra creates it from ``hydra.callbacks``,
    and it is pickled into the jobs' processes."""

    def __init__(self) -> None:
        self._launcher = ""  # known where the sweep begins
        # This process's directory when it started a job of a sweep.
        self._working_directory: str | None = None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the job before anything is written to its run folder."""
        session.restore_arguments()
        hide_urls(config)
        guest = guest_rank(os.environ)
        detaches = detach.must_detach(unchecked(config))
        try:
            if guest is not None and detaches:
                problem = f"detach=true: not as a rank of {guest.engine}; leave it out"
                raise ConfigError(Words(their_keys(config)).text(problem))
            # the other ranks find its lock
            if guest is None or guest.rank == 0:
                wait_until_free(Path(str(config.hydra.run.dir)))
            if session.check is not None:
                session.check(config)
        except ConfigError as error:
            _end(error)
        if detaches:
            raise SystemExit(detach.start())

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Begin the sweep, before the launcher is made."""
        session.restore_arguments()
        hide_urls(config)
        speak_of_keys_in(config)
        self._launcher = launcher_of(config)
        try:
            if not detach.is_detached:
                check_jobs(config, session.check)
            if detach.must_detach(unchecked(config)):
                raise SystemExit(detach.start())
            session.begin(config)
        except ConfigError as error:
            _end(error)
        except Exception:
            # Otherwise Hydra would only warn, and run a sweep that leaves no record.
            traceback.print_exc()
            raise SystemExit(EXIT_FAILED) from None

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Enter the job, in its own process, once its run folder is there."""
        restore_mask(os.environ)
        speak_of_keys_in(config)
        folder = Path(str(config.hydra.runtime.output_dir))
        # The URLs of a project's file: Hydra has just written their value.
        if hide_urls(config):
            file = folder / str(config.hydra.output_subdir) / "config.yaml"
            with contextlib.suppress(OSError):
                cfg = OmegaConf.load(file)
                OmegaConf.update(cfg, "notify.urls", None)
                OmegaConf.save(cfg, file)
        problem = misplaced_launcher(config, self._launcher)
        if problem:
            session.job = SweepJob(0, ()).refused(problem)
        elif config.hydra.mode == RunMode.MULTIRUN:
            with contextlib.suppress(OSError):  # it was removed
                self._working_directory = os.getcwd()
            session.sweep_folder = sweep_folder_of(config)
            session.job = prepare(config, folder)
            # a `main` that calls `launch` itself is called by Hydra in any case
            is_over = session.job.has_completed or session.job.is_pruned
            note_ended_earlier(folder if is_over else None)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Record the end of the job's function, unless it was interrupted."""
        if self._working_directory is not None:
            # A job in this process may have changed it, and the folders of the next jobs, which
            # are relative to it, would leave the sweep's.
            with contextlib.suppress(OSError):
                os.chdir(self._working_directory)
        note_ended_earlier(None)
        if session.job is None:
            return
        end = unwrap_job_return(job_return)
        if job_return.status is JobStatus.COMPLETED:
            session.job_ended(Status.COMPLETED, 0, result=to_plain(end))
        else:
            session.job_ended(Status.FAILED, 1, named_line(end))
        fail_fast(unchecked(config), session.job, sweep_folder_of(config))
        session.job = None

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Finish the sweep after its last job, unless a job's error has ended it."""
        code = session.finish()
        if code and not session.sets_exit_code:
            # not an Exception: those of callbacks are turned into warnings
            raise SystemExit(code)


def _end(error: ConfigError) -> NoReturn:
    print(error, file=standard_error())
    # not an Exception: those of callbacks are turned into warnings
    raise SystemExit(error.exit_code)


def remember_mask(environ: MutableMapping[str, str]) -> None:
    """Keep the user's CUDA_VISIBLE_DEVICES for `restore_mask` in the jobs."""
    environ[_OWN_MASK] = json.dumps(environ.get(_MASK))


def restore_mask(environ: MutableMapping[str, str]) -> None:
    """Restore the user's CUDA_VISIBLE_DEVICES, which submitit's local executor overwrites."""
    if environ.get("SUBMITIT_EXECUTOR") == "local" and _OWN_MASK in environ:
        environ.pop(_MASK, None)
        mask = json.loads(environ[_OWN_MASK])
        if mask is not None:
            environ[_MASK] = mask
