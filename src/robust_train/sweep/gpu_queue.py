"""``hydra/launcher=gpu_queue``: a sweep's jobs side by side, each in a process of its own.

It decides how many run at once. On which GPU a job runs is decided by the job's own launcher.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import (
    JobReturn,
    JobStatus,
    configure_log,
    filter_overrides,
    run_job,
    setup_globals,
)
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from robust_train.compat import returned_or_raised
from robust_train.config.checks import unchecked
from robust_train.config.schema import RobustConfig
from robust_train.folder.requests import (
    Refused,
    request_sweep_stop,
    sweep_stop_requested,
)
from robust_train.folder.state import read_state, read_summary
from robust_train.gpu.bounded import NoAnswer, run_command
from robust_train.host.signals import SignalWatch
from robust_train.launcher.interpreters import discard_early
from robust_train.model.errors import EXIT_BAD_CONFIG
from robust_train.sweep import current, job_record
from robust_train.sweep.job_process import JobProcess
from robust_train.sweep.live_table import LiveRow, LiveTable
from robust_train.sweep.plugins_of_others import no_objective
from robust_train.sweep.program import program
from robust_train.sweep.sweep_table import (
    SweepRow,
    differing_overrides,
    ending_line,
    ending_of_process,
    read_row,
)

log = logging.getLogger("robust_train")

LOG_FILE = "output.log"
_POLL_SECONDS = 0.1
_KILLED_SECONDS = 10.0


@dataclass
class _Job:
    """A job of the sweep. ``overrides`` are the sweeper's, ``shown`` those in which it differs."""

    number: int
    overrides: Sequence[str]
    shown: str
    config: DictConfig | None = None
    folder: Path | None = None
    process: JobProcess | None = None
    result: JobReturn | None = None
    status: str = "pending"

    def row(self) -> LiveRow:
        state = None if self.folder is None else read_state(self.folder)
        if state is None or self.process is None or state.pid != self.process.pid:
            # that of an earlier launch
            status = "starting" if self.status == "running" else self.status
            return LiveRow(self.number, self.shown, status)
        status = state.state if self.status == "running" else self.status
        return LiveRow(self.number, self.shown, status, state)


class GpuQueue:
    """Runs one batch of a sweeper's jobs, ``n_jobs`` at once; None to choose."""

    def __init__(
        self,
        context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
        n_jobs: int | None,
    ) -> None:
        self._context, self._task_function = context, task_function
        self._config, self._n_jobs = config, n_jobs
        self._settings = unchecked(config)
        self._signals = SignalWatch()
        self._pending: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._jobs: list[_Job] = []
        self._stopping: str | None = None
        self._killed_at: float | None = None
        self._received: deque[int] = deque()  # handled between two steps

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> list[JobReturn]:
        """Run the jobs; return their results in order, NaN for one that did not complete. Raises
        JobInterrupted: a signal ended the sweep, after every job has ended."""
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        Path(str(self._config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        discard_early()
        shown = differing_overrides([filter_overrides(own) for own in job_overrides])
        self._jobs = [
            _Job(initial_job_idx + index, overrides, " ".join(shown[index]))
            for index, overrides in enumerate(job_overrides)
        ]
        self._pending.extend(self._jobs)
        for job in self._jobs:
            self._plan(job, job_record.NOT_STARTED)
        slots = jobs_at_once(
            self._n_jobs,
            jobs=len(self._jobs),
            gpus=0 if self._n_jobs else count_gpus(self._settings),
            jobs_per_gpu=self._settings.gpu_jobs_per_device,
            gpus_per_job=self._settings.num_gpus,
            cpus=len(os.sched_getaffinity(0)),
        )
        with self._signals, LiveTable() as table:
            outputs = Path(str(self._config.hydra.sweep.dir)) / "*" / LOG_FILE
            log.info(
                "%d jobs, %d at once; they print to %s", len(self._jobs), slots, outputs
            )
            with self._signals.handed_to(self._received.append):
                try:
                    self._run(slots, table)
                finally:
                    self._end_all(table)
            self._signals.raise_if_received()
        nothing = no_objective(self._config.hydra)
        return [job.result or self._return(job, nothing) for job in self._jobs]

    def _run(self, slots: int, table: LiveTable) -> None:
        while True:
            while self._pending and len(self._running) < slots:
                if self._stopping is not None or self._received:
                    break
                self._start(self._pending.popleft())
            if not self._running:
                return
            self._poll(table)

    def _start(self, job: _Job) -> None:
        """JobStart a job's process, unless the job is refused or completed earlier."""
        job.config = self._compose(job)
        job.folder = _run_folder(job.config)
        if any(job.folder == other.folder for other in self._jobs if other is not job):
            # two jobs in one folder would write over each other
            reason = f"{job.folder} is another job's; hydra.sweep.subdir must differ between jobs"
            self._plan(
                job, job_record.REFUSED, exit_code=EXIT_BAD_CONFIG, reason=reason
            )
            log.error("job %d refused: %s", job.number, reason)
            job.folder, job.status = None, job_record.REFUSED
            return
        entry, record = current.plan(job.config, job.folder)
        if entry is job_record.JobStart.REUSE:
            current.reuse(record, job.folder)
            job.status = job_record.COMPLETED
            job.result = self._return(job, record.result)
            return
        job.process = JobProcess(
            partial(self._work, job), job.folder / LOG_FILE, self._detach
        )
        job.status = "running"
        self._running.append(job)
        log.info("job %d starts: %s", job.number, job.shown)

    def _compose(self, job: _Job) -> DictConfig:
        config = self._context.config_loader.load_sweep_config(
            self._config, list(job.overrides)
        )
        with open_dict(config):
            config.hydra.job.id = job.number
            config.hydra.job.num = job.number
        return config

    def _work(self, job: _Job) -> int:
        """Run the job, in its own process."""
        assert job.config is not None
        result = run_job(
            hydra_context=self._context,
            task_function=self._task_function,
            config=job.config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        if result.status is JobStatus.COMPLETED:
            return 0
        traceback.print_exception(returned_or_raised(result))
        return 1

    def _detach(self) -> None:
        """Drop the sweep's handlers, in a job's process."""
        signal.set_wakeup_fd(-1)
        self._signals.__exit__(None, None, None)

    def _poll(self, table: LiveTable) -> None:
        """Wait a moment; then handle signals and jobs that have ended."""
        table.show(lambda: [job.row() for job in self._jobs])
        time.sleep(_POLL_SECONDS)
        self._pass_on_signals()
        if self._stopping is None and sweep_stop_requested(
            Path(self._config.hydra.sweep.dir)
        ):
            self._stopping = "request"  # which the jobs see as well
            log.info(
                "robust-train run stop: no more jobs start, running ones are stopped"
            )
        for job in [
            job
            for job in self._running
            if job.process and job.process.poll() is not None
        ]:
            self._running.remove(job)
            self._take_result(job)

    def _take_result(self, job: _Job) -> None:
        assert job.process is not None
        assert job.folder is not None
        row = self._settled(job, job.folder, job.process.returncode or 0)
        completed = row.status == job_record.COMPLETED
        job.status = row.status
        job.result = self._return(
            job, row.result if completed else no_objective(self._config.hydra)
        )
        log.info("%s", ending_line(row, job.folder / LOG_FILE))
        if self._settings.sweep_fail_fast and not completed and self._stopping is None:
            with contextlib.suppress(
                OSError, Refused
            ):  # then it counts as a launch of theirs
                request_sweep_stop(Path(self._config.hydra.sweep.dir))
            self._stop("sweep_fail_fast=true", signal.SIGTERM)
            log.info(
                "sweep_fail_fast=true: no more jobs start, running ones are stopped"
            )

    def _settled(self, job: _Job, folder: Path, returncode: int) -> SweepRow:
        """Return the row of a job that has ended, and record its end if the job could not."""
        assert job.config is not None
        own = current.identity(job.config)
        record = job_record.read_record(folder)
        is_own = record is not None and record.sweep == own.sweep
        has_ended = record is not None and record.status != job_record.STARTED
        if not is_own or not (has_ended or read_summary(folder) is not None):
            ended = ending_of_process(own, returncode)
            self._plan(job, ended.status, ended.exit_code, ended.reason)
            with contextlib.suppress(OSError):  # a disk that takes nothing
                ended.write(folder)
        return replace(read_row(folder), job=job.number)

    def _pass_on_signals(self) -> None:
        """Pass the first signal on to the jobs; a second one kills them."""
        while self._received:
            signum = self._received.popleft()
            if self._stopping == "signal":
                signum = signal.SIGKILL
                self._killed_at = time.monotonic()
            else:
                log.info(
                    "stopping: each job saves a checkpoint; Ctrl-C again kills them"
                )
            self._stop("signal", signum)

    def _stop(self, why: str, signum: int) -> None:
        self._stopping = why
        for job in self._running:
            if job.process is not None:
                job.process.signal(signum)

    def _end_all(self, table: LiveTable) -> None:
        """Leave no job behind, except processes that even SIGKILL does not end."""
        if self._running and self._stopping is None:
            self._stop("an error", signal.SIGTERM)
        while self._running:
            self._poll(table)
            if self._killed_at and time.monotonic() > self._killed_at + _KILLED_SECONDS:
                numbers = ", ".join(str(job.number) for job in self._running)
                line = "left behind: the processes of jobs %s do not end when killed"
                log.error(line, numbers)
                return

    def _return(self, job: _Job, value: Any) -> JobReturn:
        """Return a job's result for the sweeper."""
        config = job.config if job.config is not None else self._compose(job)
        task_config = config.copy()
        with open_dict(task_config):
            del task_config["hydra"]
        done = JobReturn(
            overrides=list(config.hydra.overrides.task),
            cfg=task_config,
            hydra_cfg=OmegaConf.masked_copy(config, "hydra"),
            working_dir=os.getcwd(),
            task_name=str(config.hydra.job.name),
            status=JobStatus.COMPLETED,
        )
        done.return_value = value
        return done

    def _plan(
        self,
        job: _Job,
        status: str,
        exit_code: int | None = None,
        reason: str | None = None,
    ) -> None:
        """List the job in the sweep's table even if it never leaves anything in a folder."""
        if (sweep := program.sweep) is not None:
            overrides = tuple(filter_overrides(job.overrides))
            sweep.planned[job.number] = job_record.SweepJob(
                job.number, overrides, sweep.id, status, exit_code, reason=reason
            )


def _run_folder(config: DictConfig) -> Path:
    """Return the run folder that Hydra will make for a job."""
    config = copy.deepcopy(config)
    before = HydraConfig.instance().cfg
    try:
        HydraConfig.instance().set_config(config)  # ``${hydra:…}`` is resolved there
        folder = str(OmegaConf.select(config, "hydra.sweep.dir"))
        return Path(
            os.path.abspath(os.path.join(folder, str(config.hydra.sweep.subdir)))
        )
    finally:
        HydraConfig.instance().cfg = before


def jobs_at_once(
    n_jobs: int | None,
    *,
    jobs: int,
    gpus: int,
    jobs_per_gpu: int = 1,
    gpus_per_job: int = 1,
    cpus: int = 1,
) -> int:
    """Return how many of a sweep's ``jobs`` run side by side.

    Without ``n_jobs`` as many as fit on the GPUs: more would only wait behind their own siblings
    while their ``gpu_wait_timeout_minutes`` run. Without GPUs half the CPU cores, because a job on
    the CPU uses several.
    """
    wanted = n_jobs or (gpus * jobs_per_gpu // gpus_per_job if gpus else cpus // 2)
    return max(1, min(wanted, jobs))


def count_gpus(wanted: RobustConfig, limit_seconds: float = 30.0) -> int:
    """Return the number of GPUs that a sweep's job may take; 0 if the driver hangs."""
    if wanted.auto_device or wanted.device in ("auto", "cuda"):
        return _visible_gpus(limit_seconds)
    return 0 if wanted.device == "cpu" else min(1, _visible_gpus(limit_seconds))


def _visible_gpus(limit_seconds: float) -> int:
    """Count in a process of its own: the jobs, which are forks, must not inherit NVML's state."""
    command = [sys.executable, "-m", "robust_train.cli.main", "gpus", "--json"]
    try:
        listed = json.loads(run_command(command, limit_seconds).stdout)["gpus"]
    except NoAnswer:
        log.warning(
            "the NVIDIA driver has not answered for %.0f s and may be wedged: this sweep does not "
            "count its GPUs; hydra.launcher.n_jobs chooses how many jobs run at once",
            limit_seconds,
        )
        return 0
    return sum(gpu["visible"] for gpu in listed)
