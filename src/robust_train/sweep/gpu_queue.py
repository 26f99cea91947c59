"""``hydra/launcher=gpu_queue``: a sweep's jobs side by side, each in a process of its own.

It decides how many run at once. On which GPU a job runs is decided by the job's own launcher.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path

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
from robust_train.folder.state import read_state, read_summary
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.visible import visible_gpus
from robust_train.host.job_logging import shorten_lines
from robust_train.host.signals import SignalWatch, forwarded
from robust_train.launcher.interpreters import discard_early, start_early
from robust_train.model.errors import EXIT_BAD_CONFIG
from robust_train.readable import signal_name
from robust_train.report import html
from robust_train.report.status import LiveLines
from robust_train.sweep.job_process import start_job
from robust_train.sweep.points import Claims, Listed, Points
from robust_train.sweep.pruning import Reports
from robust_train.sweep.record import (
    COMPLETED,
    DIED,
    INTERRUPTED,
    NOT_STARTED,
    PRUNED,
    REFUSED,
    STARTED,
    SweepJob,
    read_record,
    read_row,
    screen_table,
)
from robust_train.sweep.session import INTERRUPTIONS, plan, session

log = logging.getLogger("robust_train")

LOG_FILE = "output.log"
_POLL_SECONDS = 0.1
_KILLED_SECONDS = 10.0
_REFRESH_SECONDS = 0.5


@dataclass
class RunningJob:
    """A job's process."""

    number: int
    folder: Path
    process: ForkProcess
    has_begun: bool = False  # until then the folder may be as an earlier launch left it
    is_pruned: bool = False  # or about to be

    def begins(self) -> bool:
        """Return whether what its folder holds is its own."""
        if not self.has_begun:
            state = read_state(self.folder)
            self.has_begun = state is not None and state.pid == self.process.pid
        return self.has_begun


class LiveTable(LiveLines):
    """Context manager that shows a sweep's jobs, on a terminal; elsewhere nothing."""

    _next_refresh = 0.0

    def show(
        self,
        rows: Mapping[int, SweepJob],
        running: Sequence[RunningJob],
        reports: Reports,
    ) -> None:
        """Show the table as it is now, at most twice a second."""
        if self._area is None or time.monotonic() < self._next_refresh:
            return
        self._next_refresh = time.monotonic() + _REFRESH_SECONDS
        from rich.text import Text

        now = {job.number: read_row(job.folder) for job in running if job.begins()}
        lines = screen_table([*{**rows, **now}.values()], reports.last, self._area.size)
        self._area.show([Text(line, style="dim") for line in lines])


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
        self._context, self._task_function = context, task_function
        self._config, self._n_jobs = config, n_jobs
        self._settings = unchecked(config)
        self._folder = Path(str(config.hydra.sweep.dir))
        self._reports = Reports(self._folder, "max" if maximize else "min")
        self._points: Points
        self._signals = SignalWatch()
        # every job that is known, as it stands; the sweep's table has those that left no folder
        self._rows = {} if session.sweep is None else session.sweep.known
        self._configs: dict[int, DictConfig] = {}
        self._running: list[RunningJob] = []
        self._stopping: str | None = None
        self._killed_at: float | None = None
        self._has_warned = False
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
        return [self._return(number, listed[number]) for number in listed]

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
        sweep = "" if session.sweep is None else session.sweep.table.sweep
        for number, overrides in listed.items():
            own = tuple(filter_overrides(overrides))
            self._rows[number] = SweepJob(number, own, sweep, NOT_STARTED)
        slots = jobs_at_once(
            self._settings,
            self._n_jobs,
            points.most,
            gpus=0 if self._n_jobs else count_gpus(self._settings),
            cpus=len(os.sched_getaffinity(0)),
        )
        outputs = self._folder / "*" / LOG_FILE
        with self._signals, LiveTable() as table:
            log.info(
                "%d jobs, %d at once; they print to %s", points.most, slots, outputs
            )
            with self._signals.handed_to(self._received.append):
                try:
                    goes_on = self._fill(slots)
                    html.prepare()  # while the first jobs start: a later one is a fork
                    while goes_on:
                        self._poll(table)
                        goes_on = self._fill(slots)
                finally:
                    self._end_all(table)
            if session.sweep is not None and self._signals.received is not None:
                # one more must not cost the table: until the sweep is finished
                signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTIONS)
            self._signals.raise_if_received()

    def _fill(self, slots: int) -> bool:
        """Start jobs while there is room; return whether the sweep goes on."""
        while not self._is_stopping:
            most = requested_max_jobs(self._folder)  # robust-train sweep max-jobs
            if len(self._running) >= (slots if most is None else most):
                break
            if (found := self._points.next()) is None:
                break
            self._start(*found)
        return bool(self._running) or not (self._is_stopping or self._points.is_over)

    @property
    def _is_stopping(self) -> bool:
        return self._stopping is not None or bool(self._received)

    def _start(self, number: int, overrides: Sequence[str]) -> None:
        """Start a job's process, unless the job is refused or completed earlier."""
        config = self._compose(number, overrides)
        folder = _run_folder(config)
        if number in self._rows:  # listed, so its result is asked for
            self._configs[number] = config
        others = (row.folder for n, row in self._rows.items() if n != number)
        if str(folder) in others:
            # two jobs in one folder would write over each other
            reason = f"{folder} is another job's; hydra.sweep.subdir must differ between jobs"
            log.error("job %d refused: %s", number, reason)
            row = replace(
                self._rows[number],
                status=REFUSED,
                exit_code=EXIT_BAD_CONFIG,
                reason=reason,
            )
            self._ended(row)
            return
        job = plan(config, folder)
        assert job.record is not None
        if not job.runs:
            self._ended(replace(read_row(folder), job=number))
            return
        work, output = partial(self._work, config), folder / LOG_FILE
        process = start_job(work, output, self._detach)
        self._rows[number] = replace(job.record, status="starting", folder=str(folder))
        self._reports.forget(number)
        self._running.append(RunningJob(number, folder, process))
        own = [one for one in overrides if one not in self._points.fixed]
        log.info("job %d starts: %s", number, " ".join(public_command(own)))

    def _compose(self, number: int, overrides: Sequence[str]) -> DictConfig:
        loader = self._context.config_loader
        config = loader.load_sweep_config(self._config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
        return config

    def _work(self, config: DictConfig) -> int:
        """Run a job, in its own process."""
        settings = unchecked(config)
        if not settings.runs_inline:  # while Hydra prepares the job and a GPU is found
            start_early(("torch",) if settings.is_built_in else ())
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
        table.show(self._rows, self._running, self._reports)
        # until a job ends: its GPU is free, and the next one takes some time to start
        wait([job.process.sentinel for job in self._running], _POLL_SECONDS)
        while self._received:
            self._pass_on(self._received.popleft())
        if self._stopping is None and sweep_stop_requested(self._folder):
            self._stopping = "request"  # which the jobs see as well
            log.info("robust-train stop: no more jobs start, running ones are stopped")
        for job in list(self._running):
            code = job.process.exitcode
            self._read_reports(job)
            if code is not None:
                job.process.close()  # or a long sweep runs out of descriptors
                self._running.remove(job)
                self._settle(job, code)

    def _read_reports(self, job: RunningJob) -> None:
        """Stop a job that does worse than others at the same step."""
        if job.is_pruned or not job.begins():
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
                self._reports.mode,
            )
        if not values or self._is_stopping:
            return
        reason = self._points.reported(job.number, values)
        if reason is None and self._reports.is_behind(job.number, patience):
            reason = f"worse than another job at {patience} reports in a row"
        if reason is not None:
            with contextlib.suppress(OSError):
                request_pruning(job.folder, reason)
                job.is_pruned = True

    def _settle(self, job: RunningJob, returncode: int) -> None:
        """Take how a job has ended; record it if the job could not."""
        own, record = self._rows[job.number], read_record(job.folder)
        is_own = record is not None and record.sweep == own.sweep
        if record and is_own and (record.status != STARTED or read_summary(job.folder)):
            row = replace(read_row(job.folder), job=job.number)
        else:
            status, code, reason = ending_of_process(returncode)
            row = replace(own, status=status, exit_code=code, reason=reason)
            with contextlib.suppress(OSError):  # a disk that takes nothing
                row.write(job.folder)
        self._ended(row)
        line = f"job {row.job} {row.status}"
        if row.status == COMPLETED and row.wall_seconds is not None:
            line += f" in {row.wall_seconds:.1f} s"
        elif row.status == PRUNED:
            line += f": {row.reason}"
        elif row.status not in (COMPLETED, INTERRUPTED):
            line += f": {' '.join(str(row.reason).split())}; {job.folder / LOG_FILE}"
        log.info("%s", line)
        if self._settings.sweep_fail_fast and row.has_failed and self._stopping is None:
            # without the file it counts as a launch of theirs
            with contextlib.suppress(OSError, Refused):
                request_sweep_stop(self._folder)
            self._stop("sweep_fail_fast=true", signal.SIGTERM)
            log.info(
                "sweep_fail_fast=true: no more jobs start, running ones are stopped"
            )

    def _ended(self, row: SweepJob) -> None:
        assert row.job is not None
        self._rows[row.job] = row
        self._points.ended(row)

    def _pass_on(self, signum: int) -> None:
        """Pass the first signal on to the jobs; a second one kills them."""
        if self._stopping == "signal":
            signum = signal.SIGKILL
            self._killed_at = time.monotonic()
        else:
            log.info("stopping: each job saves a checkpoint; Ctrl-C again kills them")
        self._stop("signal", signum)

    def _stop(self, why: str, signum: int) -> None:
        self._stopping = why
        for job in self._running:
            if job.process.exitcode is None and job.process.pid is not None:
                # one that it has received as well counts once
                os.kill(job.process.pid, forwarded(signum))

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

    def _return(self, number: int, overrides: Sequence[str]) -> JobReturn:
        """Return a job's result for the sweeper."""
        config = self._configs.get(number) or self._compose(number, overrides)
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
        row = self._rows[number]
        done.return_value = row.result if row.status == COMPLETED else math.nan
        return done


def ending_of_process(returncode: int) -> tuple[str, int, str | None]:
    """Return status, exit code and reason of a job that left nothing but its process's end."""
    if returncode == 0:
        return COMPLETED, 0, None
    signum = -returncode if returncode < 0 else returncode - 128
    if signum in INTERRUPTIONS:
        name = signal_name(signum)
        return INTERRUPTED, 128 + signum, f"interrupted by {name} before it had begun"
    if returncode < 0:
        return DIED, 1, f"its process was killed by {signal_name(signum)}"
    why = f"its process ended with exit code {returncode} and without a summary"
    return DIED, returncode, why


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
    wanted: RobustConfig,
    n_jobs: int | None,
    jobs: int,
    *,
    gpus: int,
    cpus: int,
) -> int:
    """Return how many of a sweep's ``jobs`` run side by side.

    Without ``n_jobs`` as many as fit on the GPUs: more would only wait behind their own siblings
    while their ``gpu_wait_timeout_minutes`` run. Without GPUs half the CPU cores, because a job on
    the CPU uses several.
    """
    on_gpus = gpus * wanted.gpu_jobs_per_device // wanted.num_gpus
    return max(1, min(n_jobs or (on_gpus if gpus else cpus // 2), jobs))


def count_gpus(wanted: RobustConfig) -> int:
    """Return the number of GPUs that a sweep's job may take; 0 if the driver hangs.

    Counted in a fork: the jobs, which are forks too, must not inherit NVML's state.
    """
    if wanted.device == "cpu" and not wanted.picks_gpu:
        return 0
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = visible_gpus(read_inventory(processes=False), os.environ)
            os.write(
                write_end, f"{len(found.gpus)} {found.inventory.answered:d}".encode()
            )
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answer:  # the driver is not waited for any longer
        count, has_answered = map(int, answer.read().split() or (0, 1))
    os.waitpid(child, 0 if has_answered else os.WNOHANG)
    if not has_answered:
        log.warning(
            "the NVIDIA driver has not answered and may be wedged: this sweep does not count its "
            "GPUs; hydra.launcher.n_jobs chooses how many jobs run at once"
        )
    takes_any = wanted.picks_gpu or wanted.device in ("auto", "cuda")
    return count if takes_any else min(1, count)
