"""Starts, records and finishes a sweep, or the single job, that Hydra runs in this process.

Hydra creates a `SweepCallback` and calls its methods in this order:

- ``on_multirun_start`` starts a sweep, in the sweep's process. Without a sweep, Hydra calls
  ``on_run_start`` instead.
- ``on_job_start`` and ``on_job_end`` record a job, in the process that runs it: the sweep's
  process, a fork of it, or a process that joblib or submitit started.
- ``on_multirun_end`` shows the table and sets the exit code, in the sweep's process.

Hydra's callback and the commands cannot pass each other objects, so they share `session`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
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
from robust_train.config.words import Words
from robust_train.files import to_plain
from robust_train.folder.hydra_state import close_to_others
from robust_train.folder.lock import RunLock, wait_until_free
from robust_train.folder.requests import SWEEP_LIMIT_FILE
from robust_train.folder.resume_command import sweep_resume_command
from robust_train.folder.secrets import public_command
from robust_train.folder.state import note_ended_earlier
from robust_train.host.engine import guest_rank
from robust_train.host.job_logging import shorten_lines
from robust_train.host.loggers import standard_error
from robust_train.host.signals import SignalWatch
from robust_train.model.errors import EXIT_FAILED, ConfigError
from robust_train.readable import named_line
from robust_train.sweep.checks import (
    check_jobs,
    explain_ignored_launcher,
    find_direction,
    launcher_of,
    name_keys_as_in,
)
from robust_train.sweep.job_start import (
    SWEEP_VARIABLE,
    fail_fast,
    prepare_job,
    repeat_of,
    sweep_folder_of,
)
from robust_train.sweep.live_sweep import Sweep
from robust_train.sweep.record import (
    Status,
    SweepJob,
    SweepTable,
    is_taken_over,
    select_job_overrides,
)

log = logging.getLogger("robust_train")

_MASK = "CUDA_VISIBLE_DEVICES"
_USERS_MASK = "ROBUST_TRAIN_SWEEP_MASK"  # a copy of `_MASK` as the user set it


@dataclass
class HydraSession:
    """The sweep and the job that this process runs, one of each at a time.

    Attributes:
        sweep: the running sweep, in its own process.
        job: the running job of a sweep, or a job that was refused.
        exit_code: the exit code of the first job that did not complete, else 0.
        sets_exit_code: whether a command of robust-train ends the process with that code.
        check: raises ConfigError if a job cannot run with a config.
        arguments: the user's arguments on the command line. Hydra gets more.
        sweep_folder: the folder of the sweep to which `job` belongs.
    """

    sweep: Sweep | None = None
    job: SweepJob | None = None
    exit_code: int = 0
    sets_exit_code: bool = False
    check: Callable[[DictConfig], None] | None = None
    arguments: list[str] | None = None
    sweep_folder: Path = Path()
    _refusals: set[str] = field(default_factory=set)

    def restore_arguments(self) -> None:
        """Restore the user's command line in ``sys.argv``, which the user's code may read.

        Hydra has already read the longer command line that it got.
        """
        if self.arguments is not None:
            sys.argv[1:] = self.arguments

    def add_exit_code(self, exit_code: int) -> None:
        """Record the exit code of a job. The first code that is not 0 counts."""
        self.exit_code = self.exit_code or exit_code

    def end_job(
        self, status: str, exit_code: int, reason: str | None = None, result: Any = None
    ) -> None:
        """Record the end of the current job. For each job, only the first call counts."""
        self.add_exit_code(exit_code)
        if self.job is not None and self.job.is_running:
            self.job = replace(
                self.job, status=status, exit_code=exit_code, reason=reason, result=result
            )
            if not is_taken_over(self.sweep_folder, self.job.sweep):
                self.job.write(self.job.path)

    def refuse(self, error: ConfigError) -> None:
        """Print why a job was refused, once for all jobs of a sweep with the same mistake."""
        message = str(error)
        if message not in self._refusals:
            self._refusals.add(message)
            print(message, file=standard_error())

    def start_sweep(self, config: DictConfig) -> None:
        """Start a sweep before its first job: lock its folder and write ``sweep.json``.

        Raises:
            ConfigError: another sweep runs in the folder, or the folder cannot be used. Then
                nothing was written.
        """
        # If an error ended an earlier sweep of this process, that sweep is not finished yet.
        self.finish()
        if not OmegaConf.is_interpolation(config.hydra.sweep, "subdir"):
            raise ConfigError(
                f"hydra.sweep.subdir={config.hydra.sweep.subdir}: each job needs its own run "
                "folder inside the sweep's folder, such as hydra.sweep.subdir='${hydra.job.num}'"
            )
        settings = unchecked(config)
        folder = sweep_folder_of(config).resolve()
        launcher = launcher_of(config)
        sweeper = str(config.hydra.sweeper.get("_target_")).rpartition(".")[2]
        if sweeper == "RobustSweeper":
            launcher = "gpu_queue"
        shorten_lines()
        direction = find_direction(config)
        task_overrides = [str(override) for override in config.hydra.overrides.task]
        id_ = uuid.uuid4().hex
        try:
            folder.mkdir(parents=True, exist_ok=True)
            close_to_others(folder)
            lock = RunLock(folder, id_)
            table = SweepTable(
                id_,
                launcher,
                resume_command=sweep_resume_command(folder, str(config.hydra.runtime.cwd)),
                overrides=tuple(public_command(select_job_overrides(task_overrides))),
                direction=direction,
                repeat=repeat_of(config),
            )
            # The limit was meant for an earlier launch.
            (folder / SWEEP_LIMIT_FILE).unlink(missing_ok=True)
            table.write(folder)
        except OSError as error:
            raise ConfigError(f"sweep folder {folder}: {error.strerror}") from error
        if settings.sweep_patience and launcher != "gpu_queue":
            log.warning(
                f"sweep_patience={settings.sweep_patience}: hydra/launcher={launcher} runs each "
                "job to its end; gpu_queue and our sweepers stop jobs that are behind"
            )
        os.environ[SWEEP_VARIABLE] = id_
        remember_mask(os.environ)
        notifier = Notifier(notify_settings(settings.notify, os.environ))
        self.sweep = Sweep(table, folder, lock, notifier)
        self.exit_code = 0
        detach.report_start(folder, detach.sweep_text(folder))
        # If a job's error ends the sweep in a project with its own command, Hydra does not call
        # `on_multirun_end`.
        atexit.register(self.finish)

    def finish(self) -> int:
        """Finish the sweep, and return the exit code that follows from its jobs.

        Without a sweep, and after the first call, only the exit code is returned.
        """
        sweep = self.sweep
        self.sweep = None
        if sweep is None or sweep.pid != os.getpid():
            return self.exit_code
        signals = SignalWatch()

        def hurry(signum: int) -> None:
            sweep.notifier.hurry()

        # Another signal must not prevent the table. If an interrupted sweep left signals blocked,
        # `SignalWatch` blocks them again at the end, so that the exit code is not lost while the
        # interpreter ends.
        with signals, signals.hand_signals_to(hurry):
            try:
                self.add_exit_code(sweep.show_and_write())
            finally:
                sweep.lock.release()
            sweep.notifier.finish()
        return self.exit_code


session = HydraSession()
"""The only session of this process."""


class SweepCallback(Callback):
    """Records a sweep, whichever launcher runs its jobs.

    Hydra creates it from ``hydra.callbacks``. joblib and submitit pickle it into the jobs'
    processes.
    """

    def __init__(self) -> None:
        self._launcher: str | None = None  # set when the sweep starts
        self._working_directory: str | None = None  # of this process, before the job

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check a single job before anything is written into its run folder."""
        session.restore_arguments()
        hide_urls(config)
        guest = guest_rank(os.environ)
        detaches = detach.must_detach(unchecked(config))
        try:
            if guest is not None and detaches:
                problem = f"detach=true: not as a rank of {guest.engine}; leave it out"
                raise ConfigError(Words(their_keys(config)).reword(problem))
            # Rank 0 locks the run folder for all ranks.
            if guest is None or guest.rank == 0:
                wait_until_free(Path(str(config.hydra.run.dir)))
            if session.check is not None:
                session.check(config)
        except ConfigError as error:
            _exit_with(error)
        if detaches:
            raise SystemExit(detach.start())

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check and start the sweep, before Hydra creates its launcher."""
        session.restore_arguments()
        hide_urls(config)
        name_keys_as_in(config)
        self._launcher = launcher_of(config)
        try:
            if not detach.is_detached:
                check_jobs(config, session.check)
            if detach.must_detach(unchecked(config)):
                raise SystemExit(detach.start())
            session.start_sweep(config)
        except ConfigError as error:
            _exit_with(error)
        except Exception:
            # Hydra would only warn, and run a sweep that leaves no record.
            traceback.print_exc()
            raise SystemExit(EXIT_FAILED) from None

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Record the start of a job in its own process, after Hydra has created its run folder."""
        restore_mask(os.environ)
        name_keys_as_in(config)
        folder = Path(str(config.hydra.runtime.output_dir))
        if hide_urls(config):
            # Hydra has just written the URLs, which are secret, into the run folder.
            _remove_urls(folder / str(config.hydra.output_subdir) / "config.yaml")
        problem = explain_ignored_launcher(config, self._launcher)
        if problem is not None:
            session.job = SweepJob(0, ()).as_refused(problem)
        elif config.hydra.mode == RunMode.MULTIRUN:
            with contextlib.suppress(OSError):  # The directory may have been removed.
                self._working_directory = os.getcwd()
            session.sweep_folder = sweep_folder_of(config)
            session.job = prepare_job(config, folder)
            # Hydra calls the project's ``main`` even if the job is over. If it calls ``launch``,
            # that returns the earlier summary.
            is_over = session.job.has_completed or session.job.is_pruned
            note_ended_earlier(folder if is_over else None)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Record how the job's function ended. Hydra does not call this for an interrupted job."""
        if self._working_directory is not None:
            # The job may have changed the working directory of this process. Run folders are
            # relative to it, so the next jobs would run elsewhere.
            with contextlib.suppress(OSError):
                os.chdir(self._working_directory)
        note_ended_earlier(None)
        if session.job is None:
            return
        end = unwrap_job_return(job_return)
        if job_return.status is JobStatus.COMPLETED:
            session.end_job(Status.COMPLETED, 0, result=to_plain(end))
        else:
            session.end_job(Status.FAILED, 1, named_line(end))
        fail_fast(unchecked(config), session.job, sweep_folder_of(config))
        session.job = None

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Finish the sweep after its last job. Hydra does not call this if a job raised."""
        code = session.finish()
        if code and not session.sets_exit_code:
            # Hydra would turn an Exception of a callback into a warning. SystemExit is not one.
            raise SystemExit(code)


def _exit_with(error: ConfigError) -> NoReturn:
    """Print an error and exit. Hydra would turn a ConfigError of a callback into a warning."""
    print(error, file=standard_error())
    raise SystemExit(error.exit_code)


def _remove_urls(path: Path) -> None:
    """Remove the notification URLs from a config that Hydra wrote."""
    with contextlib.suppress(OSError):
        cfg = OmegaConf.load(path)
        OmegaConf.update(cfg, "notify.urls", None)
        OmegaConf.save(cfg, path)


def remember_mask(environ: MutableMapping[str, str]) -> None:
    """Save the user's CUDA_VISIBLE_DEVICES for `restore_mask`, which the jobs call."""
    environ[_USERS_MASK] = json.dumps(environ.get(_MASK))


def restore_mask(environ: MutableMapping[str, str]) -> None:
    """Restore the user's CUDA_VISIBLE_DEVICES, which submitit's local executor overwrites."""
    if environ.get("SUBMITIT_EXECUTOR") == "local" and _USERS_MASK in environ:
        environ.pop(_MASK, None)
        mask = json.loads(environ[_USERS_MASK])
        if mask is not None:
            environ[_MASK] = mask
