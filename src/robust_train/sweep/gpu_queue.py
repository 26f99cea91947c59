"""Runs a sweep's jobs side by side, each in its own process (``hydra/launcher=gpu_queue``).

Hydra's launcher plugin or one of our sweepers creates a `GpuQueue` in the sweep's process. It
decides how many jobs run at once. Each job's own launcher decides on which GPU the job runs.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path

from hydra.core.utils import (
    JobReturn,
    JobStatus,
    configure_log,
    filter_overrides,
    run_job,
    setup_globals,
)
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from robust_train.children.interpreters import discard_early, start_early
from robust_train.compat import unwrap_job_return
from robust_train.config.checks import unchecked
from robust_train.config.refusals import REFUSALS, explain_job
from robust_train.folder.requests import (
    request_pruning,
    requested_sweep_limit,
    sweep_stop_requested,
)
from robust_train.host.job_logging import shorten_lines
from robust_train.host.loggers import show_lines
from robust_train.host.signals import SignalWatch, signal_to_forward
from robust_train.model.errors import ConfigError
from robust_train.model.events import ValueReported
from robust_train.report import html
from robust_train.report.status import LiveLines
from robust_train.sweep.checks import name_keys_as_in, resolve_hydra
from robust_train.sweep.job_process import start_job
from robust_train.sweep.job_start import fail_fast, prepare_job, sweep_folder_of
from robust_train.sweep.packing import GpuMemory, Packer, largest_first
from robust_train.sweep.pruning import Reports
from robust_train.sweep.record import (
    INTERRUPTIONS,
    Status,
    SweepJob,
    build_row,
    is_taken_over,
    job_folders,
    read_record,
    read_row,
    select_job_overrides,
)
from robust_train.sweep.session import session
from robust_train.sweep.slots import choose_slots, read_gpu_memory
from robust_train.sweep.table import screen_table, tally, without

log = logging.getLogger("robust_train")

LOG_FILE = "output.log"  # what a job prints, in its run folder
_POLL_SECONDS = 0.1
_KILLED_SECONDS = 10.0  # that killed jobs have to end
_REFRESH_SECONDS = 0.5  # between two drawings of the live table


class Jobs:
    """The jobs that a sweep still has to start. The subclass `Search` adds jobs one by one.

    Attributes:
        overrides: the overrides of the jobs that are known when the sweep starts, by number.
        max_jobs: the number of jobs that the sweep has in the end.
    """

    prunes = False
    """Whether `find_reason_to_prune` may stop a job."""

    def __init__(self, overrides: Mapping[int, Sequence[str]]) -> None:
        self.overrides = overrides
        self.max_jobs = len(overrides)
        self._waiting = dict(overrides)

    @property
    def is_over(self) -> bool:
        """Whether the sweep has no more jobs to start. Only read while no job runs."""
        return not self._waiting

    def take_next(self) -> tuple[int, Sequence[str]] | None:
        """Return the number and the overrides of a job to start now, or None."""
        if not self._waiting:
            return None
        number = next(iter(self._waiting))
        return number, self._waiting.pop(number)

    def find_reason_to_prune(self, job: int, values: Sequence[ValueReported]) -> str | None:
        """Read a job's new reports. Return the reason to stop the job early, or None."""
        return None

    def record_end(self, row: SweepJob) -> None:
        """Record that a job has ended."""


class GpuQueue:
    """Runs a sweep's jobs side by side.

    Args:
        context, task_function, config: Hydra's.
        n_jobs: how many jobs run at once, None to choose the number.

    Attributes:
        sweep: the sweep of this process.
        folder: the sweep's folder.
        rows: the latest row of each job, by number. The sweep's table shows it for jobs that left
            no run folder.

    Raises:
        ConfigError: the config does not build on robust-train's.
    """

    def __init__(
        self,
        context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
        n_jobs: int | None,
    ) -> None:
        if session.sweep is None:
            raise ConfigError(
                "hydra/launcher=gpu_queue: this config does not build on robust-train's: use "
                "robust_train.hydra_main, or add defaults: [robust] with "
                "hydra.searchpath: [pkg://robust_train.configs]"
            )
        self._context = context
        self._task_function = task_function
        self._config = config
        self._n_jobs = n_jobs
        self._settings = unchecked(config)
        self.sweep = session.sweep
        self.folder = session.sweep.folder
        self.rows = session.sweep.known
        # `run` sets both attributes.
        self._jobs: Jobs
        self._reports: Reports
        self._packer: Packer | None = None  # with gpu_jobs_per_device=auto
        self._running: dict[int, ForkProcess] = {}
        self._pruned: set[int] = set()  # jobs that were asked to end early
        self._signals = SignalWatch()
        self._received: deque[int] = deque()  # signals that `_poll` has not handled yet
        self._is_stopping = False  # no more jobs start
        self._has_passed_on = False  # whether a signal was sent to the jobs
        self._killed_at = math.inf
        self._next_show = 0.0

    def launch(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
        """Run the jobs of a sweeper of Hydra or of a plugin, the first with number ``first``.

        Returns:
            The results in order, NaN for a job that did not complete.

        Raises:
            JobInterrupted: a signal ended the sweep, after every job has ended.
        """
        overrides = dict(enumerate(job_overrides, first))
        self.run(self.order_jobs(overrides))
        returned = []
        for number in overrides:
            row = self.rows[number]
            job = JobReturn(overrides=row.overrides, status=JobStatus.COMPLETED)
            job.return_value = row.objective
            returned.append(job)
        return returned

    def order_jobs(self, overrides: Mapping[int, Sequence[str]]) -> Jobs:
        """Return jobs in the order of their numbers, or the largest first if they share GPUs."""
        if self._settings.packs_gpus:
            overrides = largest_first(overrides)
        return Jobs(overrides)

    def run(self, jobs: Jobs) -> None:
        """Run jobs to their ends. As soon as a job ends, the next job starts.

        Raises:
            JobInterrupted: a signal ended the sweep, after every job has ended.
        """
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        shorten_lines()
        show_lines()
        name_keys_as_in(self._config)
        discard_early()
        self._jobs = jobs
        for number, overrides in jobs.overrides.items():
            self.rows[number] = self._not_started(number, overrides)
        self._reports = self._read_earlier_reports()
        slots = self._choose_slots()
        with self._signals, LiveLines() as live:
            log.info(
                "%d jobs, %d at once; they print to %s",
                jobs.max_jobs,
                slots,
                self.folder / "*" / LOG_FILE,
            )
            with self._signals.hand_signals_to(self._received.append):
                try:
                    self._signals.raise_if_received()
                    continues = self._start_jobs(slots)
                    # Import while the first jobs start. Later jobs are forks that have it already.
                    html.prepare()
                    while continues:
                        self._poll(live)
                        continues = self._start_jobs(slots)
                except BaseException:
                    if not self._is_stopping:
                        self._stop(signal.SIGTERM)
                    while self._running:
                        self._poll(live)
                    raise
            if self._signals.received:
                # Block signals until the sweep is finished, so that none prevents its table.
                signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTIONS)
            self._signals.raise_if_received()

    def _read_earlier_reports(self) -> Reports:
        """Return the values that jobs of this sweep reported before, if jobs may be pruned."""
        table = self.sweep.table
        if not self._jobs.prunes and self._settings.sweep_patience is None:
            return Reports()
        reports = Reports(table.direction[:3])
        for folder in job_folders(self.folder):
            record = read_record(folder)
            if record is None:
                continue
            # The folder may also have jobs of other sweeps.
            row = self.rows.get(record.job)
            is_same_job = row is not None and row.computes_same_as(record)
            if is_same_job or record.sweep == table.sweep:
                reports.begin(record.job, folder)
        return reports

    def _choose_slots(self) -> int:
        """Return how many jobs run at once, and prepare to change it if jobs share GPUs."""
        memory_by_gpu: Mapping[str, GpuMemory] = {}
        if not self._n_jobs:
            memory_by_gpu = read_gpu_memory(self._settings)
        slots = choose_slots(
            self._settings,
            self._n_jobs,
            self._jobs.max_jobs,
            gpus=len(memory_by_gpu),
            cpus=len(os.sched_getaffinity(0)),
        )
        if self._settings.packs_gpus and not self._n_jobs:
            self._packer = Packer(
                self._settings, slots, memory_by_gpu, partial(read_gpu_memory, self._settings)
            )
        return slots

    def _not_started(self, number: int, overrides: Sequence[str]) -> SweepJob:
        """Return the row of a job that has not started."""
        table = self.sweep.table
        return SweepJob(
            number,
            tuple(filter_overrides(overrides)),
            table.sweep,
            Status.NOT_STARTED,
            trial=number // table.repeat,
        )

    def _start_jobs(self, slots: int) -> bool:
        """Start jobs while there is room. Return whether the sweep continues."""
        while not self._is_interrupted():
            if self._packer is not None:
                slots = self._packer.packing.limit
            # The command ``robust-train sweep limit`` overrides every other limit.
            limit = requested_sweep_limit(self.folder)
            if limit is None:
                limit = slots
            if len(self._running) >= limit:
                break
            next_job = self._jobs.take_next()
            if next_job is None:
                break
            number, overrides = next_job
            self._start(number, overrides)
        if self._running:
            return True
        return not self._is_interrupted() and not self._jobs.is_over

    def _is_interrupted(self) -> bool:
        """Return whether the sweep stops, or has received a signal that will stop it."""
        return self._is_stopping or bool(self._received)

    def _start(self, number: int, overrides: Sequence[str]) -> None:
        """Start a job's process, unless the job completed earlier."""
        loader = self._context.config_loader
        try:
            config = loader.load_sweep_config(self._config, list(overrides))
        except REFUSALS as error:
            # The check before the sweep does not see every job, and a file may have changed since.
            reason = explain_job(error, self._config, overrides)
            log.error("job %d refused: %s", number, reason)
            self._record_end(self._not_started(number, overrides).as_refused(reason))
            return
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
        with resolve_hydra(config):
            path = sweep_folder_of(config) / str(config.hydra.sweep.subdir)
        folder = Path(os.path.abspath(path))
        job = prepare_job(config, folder)
        self._reports.begin(number, folder)
        if not job.is_running:
            if job.status == Status.REFUSED:
                log.error("job %d refused: %s", number, job.reason)
            self._record_end(build_row(job, folder))
            return
        work = partial(self._work, config)
        drop_handlers = self._signals.__exit__
        self._running[number] = start_job(work, folder / LOG_FILE, drop_handlers)
        self.rows[number] = replace(job, status="starting")
        differing = without(select_job_overrides(job.overrides), self.sweep.table.overrides)
        log.info("job %d starts: %s", number, differing)

    def _work(self, config: DictConfig) -> int:
        """Run a job, in its own process. Return the exit code."""
        settings = unchecked(config)
        if not settings.runs_inline:
            # The attempt's interpreter imports while Hydra prepares the job and it gets a GPU.
            modules = ("torch",) if settings.is_built_in else ()
            start_early(modules)
        try:
            result = run_job(
                hydra_context=self._context,
                task_function=self._task_function,
                config=config,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )
        finally:
            discard_early()
        if result.status is JobStatus.COMPLETED:
            return 0
        traceback.print_exception(unwrap_job_return(result))
        return 1

    def _poll(self, live: LiveLines) -> None:
        """Wait a moment, then handle signals and jobs that have ended."""
        self._show(live)
        if self._packer is not None:
            self._packer.look([self.rows[number].path for number in self._running])
        # Stop waiting as soon as a job ends, because its GPU is free.
        wait([process.sentinel for process in self._running.values()], _POLL_SECONDS)
        while self._received:
            self._pass_on(self._received.popleft())
        if not self._is_stopping and self._has_lost_folder():
            self._is_stopping = True  # The sweep's end logs the reason.
        if not self._is_stopping and sweep_stop_requested(self.folder):
            self._is_stopping = True  # The running jobs see the request themselves.
            log.info("the sweep is stopped: no more jobs start, running jobs end")
        for number, process in list(self._running.items()):
            code = process.exitcode
            self._read_reports(number)
            if code is not None:
                process.close()  # Otherwise a long sweep would run out of file descriptors.
                del self._running[number]
                self._finish_job(number, code)
        if self._running and time.monotonic() > self._killed_at + _KILLED_SECONDS:
            numbers = ", ".join(map(str, self._running))
            log.error("left behind: the processes of jobs %s do not end when killed", numbers)
            self._running.clear()

    def _show(self, live: LiveLines) -> None:
        """Show the progress of the running jobs on a terminal, twice a second."""
        if live.area is None or time.monotonic() < self._next_show:
            return
        self._next_show = time.monotonic() + _REFRESH_SECONDS
        rows = dict(self.rows)
        for number in self._running:
            row = read_row(rows[number].path)
            # A job that has not locked its run folder yet looks as if it had died.
            if row is not None and row.status != Status.DIED:
                rows[number] = row
        shown = list(rows.values())
        height = live.area.size[1] - 2
        lines = screen_table(shown, self._reports.last)
        live.draw([*lines[:height], tally(shown)])

    def _read_reports(self, number: int) -> None:
        """Read a job's new reports, and ask the job to end if it is worse than others."""
        folder = self.rows[number].path
        values = self._reports.read_new(number, folder)
        if not values or number in self._pruned or self._is_stopping:
            return
        patience = self._settings.sweep_patience or 0
        reason = self._jobs.find_reason_to_prune(number, values)
        if reason is None and self._reports.is_behind(number, patience):
            reason = f"worse than another job at {patience} reports in a row"
        if reason is not None:
            with contextlib.suppress(OSError):
                request_pruning(folder, reason)
                self._pruned.add(number)

    def _finish_job(self, number: int, returncode: int) -> None:
        """Record and log the end of a job's process. The job may have died without a record."""
        folder = self.rows[number].path
        started = replace(self.rows[number], status=Status.STARTED)
        if self._has_lost_folder():
            row = build_row(started, Path(), returncode)
        else:
            row = build_row(read_record(folder) or started, folder, returncode)
            row.write(folder)
        line = f"job {row.job} {row.status}"
        if row.has_completed and row.wall_seconds is not None:
            line += f" in {row.wall_seconds:.1f} s"
        elif row.reason is not None:
            line += f": {' '.join(row.reason.split())}; {folder / LOG_FILE}"
        log.info("%s", line)
        self._record_end(row)

    def _record_end(self, row: SweepJob) -> None:
        """Keep the row of a job that has ended. With sweep_fail_fast, a failure ends the sweep."""
        self.rows[row.job] = row
        if self._has_lost_folder():
            return
        self._jobs.record_end(row)
        if not self._is_stopping:
            fail_fast(self._settings, row, self.folder)

    def _has_lost_folder(self) -> bool:
        """Return whether another sweep has taken the folder over, with its own records."""
        return is_taken_over(self.folder, self.sweep.table.sweep)

    def _pass_on(self, signum: int) -> None:
        """Pass the first signal on to the jobs. Kill them at the second."""
        if self._has_passed_on:
            signum = signal.SIGKILL
            self._killed_at = time.monotonic()
        else:
            log.info("stopping: each job saves a checkpoint; Ctrl-C again kills them")
        self._has_passed_on = True
        self._stop(signum)

    def _stop(self, signum: int) -> None:
        """Start no more jobs, and send the running jobs a signal."""
        self._is_stopping = True
        for process in self._running.values():
            if process.exitcode is None and process.pid is not None:
                # The job may also receive the original signal. The forwarded form of it does not
                # count as a second signal.
                os.kill(process.pid, signal_to_forward(signum))
