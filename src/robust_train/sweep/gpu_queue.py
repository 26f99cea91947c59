"""``hydra/launcher=gpu_queue``: a sweep's jobs side by side, each in a process of its own.

It decides how many run at once. On which GPU a job runs is decided by the job's own launcher.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import os
import signal
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
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
from robust_train.folder.provenance import public_command
from robust_train.folder.requests import (
    Refused,
    request_pruning,
    request_sweep_stop,
    requested_max_jobs,
    sweep_stop_requested,
)
from robust_train.folder.state import RunState, read_state, read_summary
from robust_train.gpu.bounded import NoAnswer, run_command
from robust_train.host.job_logging import shorten_lines
from robust_train.host.signals import SignalWatch, forwarded
from robust_train.launcher.interpreters import discard_early
from robust_train.model.errors import EXIT_BAD_CONFIG
from robust_train.readable import aligned, shortened
from robust_train.report.status import LiveLines
from robust_train.sweep.job_process import start_job
from robust_train.sweep.points import Claims, Listed, Points
from robust_train.sweep.pruning import Reports
from robust_train.sweep.record import (
    COMPLETED,
    NOT_STARTED,
    PRUNED,
    REFUSED,
    STARTED,
    JobStart,
    SweepJob,
    differing_overrides,
    ending_line,
    ending_of_process,
    read_record,
    read_row,
    row_of,
)
from robust_train.sweep.session import CurrentJob, identity, plan, session

log = logging.getLogger("robust_train")

LOG_FILE = "output.log"
_POLL_SECONDS = 0.1
_KILLED_SECONDS = 10.0
_REFRESH_SECONDS = 0.5
_COLUMNS = (
    "job",
    "overrides",
    "status",
    "attempt",
    "device",
    "micro-batch",
    "step",
    "value",
)
_PENDING = "pending"
# what is kept in a table too small for all; failures come second
_RANKS = {"running": 0, _PENDING: 2, COMPLETED: 3}
_OTHER_LINES = 3  # the names of the columns, the tally and the line with the cursor
_LEAST_COLUMNS = 16  # of the overrides


@dataclass
class LaunchedJob:
    """A job of the sweep. ``overrides`` are the sweeper's, ``shown`` those in which it differs;
    ``state`` is ``state.json`` of its current launch, for the table."""

    number: int
    overrides: Sequence[str]
    shown: str = ""
    status: str = _PENDING
    config: DictConfig | None = None
    folder: Path | None = None
    process: ForkProcess | None = None  # while it runs
    pid: int | None = None
    result: Any = math.nan
    state: RunState | None = None
    value: float | None = None  # that it has reported last
    is_pruned: bool = False  # or about to be

    def look(self) -> None:
        """Read its state again; that of an earlier launch does not count."""
        if self.folder is not None and self.pid is not None:
            found = read_state(self.folder)
            is_own = found is not None and found.pid == self.pid
            self.state = found if is_own else None

    def cells(self) -> list[str]:
        """Return the texts of the columns."""
        status = self.status
        if status == "running":
            status = "starting" if self.state is None else self.state.state
        value = "" if self.value is None else f"{self.value:.4g}"
        cells = [str(self.number), self.shown, status, "", "", "", "", value]
        attempt = None if self.state is None else self.state.attempt
        if attempt is not None:
            of = f"/{attempt.total_steps}" if attempt.total_steps else ""
            cells[3:7] = [
                str(attempt.number),
                attempt.spec.device,
                str(attempt.spec.batch_size) if attempt.spec.has_batch else "",
                "" if attempt.step is None else f"{attempt.step}{of}",
            ]
        return cells


class LiveTable(LiveLines):
    """Context manager that shows a sweep's jobs, on a terminal; elsewhere nothing."""

    _next_refresh = 0.0

    def show(self, jobs: Sequence[LaunchedJob]) -> None:
        """Show the table as it is now, at most twice a second."""
        if self._area is not None and time.monotonic() >= self._next_refresh:
            self._next_refresh = time.monotonic() + _REFRESH_SECONDS
            from rich.text import Text

            for job in jobs:
                job.look()
            table = table_lines(jobs, *self._area.size)
            self._area.show([Text(line, style="dim") for line in table])


def table_lines(
    jobs: Sequence[LaunchedJob],
    columns: int,
    lines: int,
) -> list[str]:
    """Return the table of the jobs in at most ``lines`` lines of about ``columns`` characters."""
    # running ones are kept first, then failures
    ranked = sorted(jobs, key=lambda job: (_RANKS.get(job.status, 1), job.number))
    shown = ranked[: max(lines - _OTHER_LINES, 1)]
    shown.sort(key=lambda job: job.number)
    cells = [_COLUMNS, *(job.cells() for job in shown)]
    widths = [max(map(len, column)) + 2 for column in zip(*cells, strict=True)]
    room = max(columns - sum(widths) + widths[1], _LEAST_COLUMNS)
    table = aligned([(job, shortened(own, room), *rest) for job, own, *rest in cells])
    tally = Counter(cell[2] for cell in (job.cells() for job in jobs))
    counts = ", ".join(f"{n} {status}" for status, n in tally.items())
    hidden = f" ({len(jobs) - len(shown)} not shown)" if len(shown) < len(jobs) else ""
    return [*table, f"{len(jobs)} jobs: {counts}{hidden}"]


class GpuQueue:
    """Runs a sweep's jobs side by side, ``n_jobs`` at once; None to choose."""

    def __init__(
        self,
        context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
        n_jobs: int | None,
        *,
        maximize: bool = True,
    ) -> None:
        self._mode, self._has_warned = "max" if maximize else "min", False
        self._context, self._task_function = context, task_function
        self._config, self._n_jobs = config, n_jobs
        self._settings = unchecked(config)
        self._folder = Path(str(config.hydra.sweep.dir))
        self._signals = SignalWatch()
        self._points: Points
        self._running: list[LaunchedJob] = []
        self._jobs: dict[int, LaunchedJob] = {}
        self._stopping: str | None = None
        self._killed_at: float | None = None
        self._received: deque[int] = deque()  # handled between two steps

    def launch(
        self,
        job_overrides: Sequence[Sequence[str]],
        initial_job_idx: int,
    ) -> list[JobReturn]:
        """Run the jobs; return their results in order, NaN for one that did not complete. Raises
        JobInterrupted: a signal ended the sweep, after every job has ended."""
        listed = dict(enumerate(job_overrides, initial_job_idx))
        self._folder.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(Claims(self._folder)) as claims:
            self.run(Listed(listed, claims), listed)
        return [self._return(self._jobs[number]) for number in listed]

    def run(
        self,
        points: Points,
        listed: Mapping[int, Sequence[str]],
    ) -> None:
        """Run jobs as ``points`` gives them, one as soon as another has ended. ``listed`` are
        known before. Raises JobInterrupted as :meth:`launch` does."""
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        shorten_lines()
        discard_early()
        self._points = points
        self._reports = Reports(self._folder, self._mode)
        self._jobs = {number: LaunchedJob(number, listed[number]) for number in listed}
        own = [self._record(job, NOT_STARTED) for job in self._jobs.values()]
        shown_overrides = differing_overrides(own)
        for job, shown in zip(self._jobs.values(), shown_overrides, strict=True):
            job.shown = shown
        slots = jobs_at_once(
            self._n_jobs,
            jobs=points.most,
            gpus=0 if self._n_jobs else count_gpus(self._settings),
            jobs_per_gpu=self._settings.gpu_jobs_per_device,
            gpus_per_job=self._settings.num_gpus,
            cpus=len(os.sched_getaffinity(0)),
        )
        outputs = self._folder / "*" / LOG_FILE
        with self._signals, LiveTable() as table:
            log.info(
                "%d jobs, %d at once; they print to %s",
                points.most,
                slots,
                outputs,
            )
            with self._signals.handed_to(self._received.append):
                try:
                    self._run(slots, table)
                finally:
                    self._end_all(table)
            self._signals.raise_if_received()

    def _run(
        self,
        slots: int,
        table: LiveTable,
    ) -> None:
        while True:
            while not self._is_stopping and len(self._running) < self._most(slots):
                found = self._points.next()
                if found is None:
                    break
                number, overrides = found
                own = [o for o in overrides if o not in self._points.fixed]
                shown = " ".join(public_command(own))
                new = LaunchedJob(number, overrides, shown)
                self._start(self._jobs.setdefault(number, new))
            if not self._running and (self._is_stopping or self._points.is_over):
                return
            self._poll(table)

    def _most(self, slots: int) -> int:
        """Return how many jobs may run at once now (``robust-train sweep max-jobs``)."""
        most = requested_max_jobs(self._folder)
        return slots if most is None else most

    @property
    def _is_stopping(self) -> bool:
        return self._stopping is not None or bool(self._received)

    def _start(self, job: LaunchedJob) -> None:
        """Start a job's process, unless the job is refused or completed earlier."""
        job.config = self._compose(job)
        job.folder = _run_folder(job.config)
        others = (each for each in self._jobs.values() if each is not job)
        if any(job.folder == other.folder for other in others):
            # two jobs in one folder would write over each other
            reason = f"{job.folder} is another job's; hydra.sweep.subdir must differ between jobs"
            refused = self._record(
                job,
                REFUSED,
                EXIT_BAD_CONFIG,
                reason,
            )
            log.error(
                "job %d refused: %s",
                job.number,
                reason,
            )
            job.folder = None
            self._ended(job, row_of(None, refused, None))
            return
        if plan(job.config, CurrentJob(job.folder)) is JobStart.REUSE:
            row = replace(read_row(job.folder), job=job.number)
            self._ended(job, row)
            return
        work, output = partial(self._work, job.config), job.folder / LOG_FILE
        job.process = start_job(work, output, self._detach)
        job.pid, job.status = job.process.pid, "running"
        self._reports.forget(job.number)
        self._running.append(job)
        log.info(
            "job %d starts: %s",
            job.number,
            job.shown,
        )

    def _compose(self, job: LaunchedJob) -> DictConfig:
        loader, overrides = self._context.config_loader, list(job.overrides)
        config = loader.load_sweep_config(self._config, overrides)
        with open_dict(config):
            config.hydra.job.id = str(job.number)
            config.hydra.job.num = job.number
        return config

    def _work(self, config: DictConfig) -> int:
        """Run a job, in its own process."""
        result = run_job(
            hydra_context=self._context,
            task_function=self._task_function,
            config=config,
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
        if session.sweep is not None:
            session.sweep.take_over()
        table.show(list(self._jobs.values()))
        # until a job ends: its GPU is free, and the next one takes some time to start
        wait([j.process.sentinel for j in self._running if j.process], _POLL_SECONDS)
        while self._received:
            self._pass_on(self._received.popleft())
        if self._stopping is None and sweep_stop_requested(self._folder):
            self._stopping = "request"  # which the jobs see as well
            log.info("robust-train stop: no more jobs start, running ones are stopped")
        for job in list(self._running):
            code = None if job.process is None else job.process.exitcode
            self._take_reports(job)
            if job.process is None or code is None:
                continue
            job.process.close()  # or a long sweep runs out of descriptors
            job.process = None
            self._running.remove(job)
            self._take_result(job, code)

    def _take_reports(self, job: LaunchedJob) -> None:
        """Stop a job that does worse than others at the same step."""
        if job.state is None:
            job.look()  # until it has begun, an earlier job's journal may be there
        if job.state is None or job.folder is None or job.is_pruned:
            return
        values = self._reports.new(job.number, job.folder)
        patience = self._settings.sweep_patience
        looks = patience is not None or self._points.prunes
        if looks and self._reports.has_left_out and not self._has_warned:
            self._has_warned = True
            log.warning(
                "job %d reports a figure whose best is not its %simum, which this sweep wants: it "
                "is not looked at; objective= names another, hydra.sweeper.direction the other way",
                job.number,
                self._mode,
            )
        if not values:
            return
        job.value = values[-1].value
        if self._is_stopping:
            return
        reason = self._points.reported(job.number, values)
        if (
            reason is None
            and patience is not None
            and self._reports.is_behind(job.number, patience)
        ):
            reason = f"worse than another job at {patience} reports in a row"
        if reason is not None:
            with contextlib.suppress(OSError):
                request_pruning(job.folder, reason)
                job.is_pruned = True

    def _take_result(
        self,
        job: LaunchedJob,
        returncode: int,
    ) -> None:
        assert job.folder is not None
        row = self._settled(job, job.folder, returncode)
        self._ended(job, row)
        log.info("%s", ending_line(row, job.folder / LOG_FILE))
        has_failed = row.status not in (COMPLETED, PRUNED)
        if self._settings.sweep_fail_fast and has_failed and self._stopping is None:
            # without the file it counts as a launch of theirs
            with contextlib.suppress(OSError, Refused):
                request_sweep_stop(self._folder)
            self._stop("sweep_fail_fast=true", signal.SIGTERM)
            log.info(
                "sweep_fail_fast=true: no more jobs start, running ones are stopped"
            )

    def _ended(
        self,
        job: LaunchedJob,
        row: SweepJob,
    ) -> None:
        job.status = row.status
        if row.status == COMPLETED:
            job.result = row.result
        self._points.ended(row)

    def _settled(
        self,
        job: LaunchedJob,
        folder: Path,
        returncode: int,
    ) -> SweepJob:
        """Return the row of a job that has ended, and record its end if the job could not."""
        assert job.config is not None
        own, record = identity(job.config), read_record(folder)
        is_own = record is not None and record.sweep == own.sweep
        has_ended = record is not None and record.status != STARTED
        if not is_own or not (has_ended or read_summary(folder) is not None):
            ended = ending_of_process(own, returncode)
            self._record(
                job,
                ended.status,
                ended.exit_code,
                ended.reason,
            )
            with contextlib.suppress(OSError):  # a disk that takes nothing
                ended.write(folder)
        return replace(read_row(folder), job=job.number)

    def _pass_on(self, signum: int) -> None:
        """Pass the first signal on to the jobs; a second one kills them."""
        if self._stopping == "signal":
            signum = signal.SIGKILL
            self._killed_at = time.monotonic()
        else:
            log.info("stopping: each job saves a checkpoint; Ctrl-C again kills them")
        self._stop("signal", signum)

    def _stop(
        self,
        why: str,
        signum: int,
    ) -> None:
        self._stopping = why
        for job in self._running:
            is_there = job.process is not None and job.process.exitcode is None
            if is_there and job.pid is not None:
                # one that it has received as well counts once
                os.kill(job.pid, forwarded(signum))

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

    def _return(self, job: LaunchedJob) -> JobReturn:
        """Return a job's result for the sweeper."""
        config = job.config or self._compose(job)
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
        done.return_value = job.result
        return done

    def _record(
        self,
        job: LaunchedJob,
        status: str,
        exit_code: int | None = None,
        reason: str | None = None,
    ) -> SweepJob:
        """List the job in the sweep's table even if it never leaves anything in a folder."""
        sweep = session.sweep
        record = SweepJob(
            job.number,
            tuple(filter_overrides(job.overrides)),
            "" if sweep is None else sweep.table.sweep,
            status,
            exit_code,
            reason=reason,
        )
        if sweep is not None:
            sweep.planned[job.number] = record
        return record


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
    if wanted.picks_gpu or wanted.device in ("auto", "cuda"):
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
