"""``hydra/launcher=gpu_queue``: a sweep's jobs side by side, each in a process of its own.

It decides how many run at once. On which GPU a job runs is decided by the job's own launcher.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType
from typing import Protocol

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import (
    JobStatus,
    configure_log,
    filter_overrides,
    run_job,
    setup_globals,
)
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from robust_train.children.interpreters import discard_early, start_early
from robust_train.compat import returned_or_raised
from robust_train.config.checks import unchecked
from robust_train.config.schema import RobustConfig
from robust_train.folder.provenance import public_command
from robust_train.folder.requests import (
    request_pruning,
    requested_max_jobs,
    sweep_stop_requested,
)
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.visible import visible_gpus
from robust_train.host.job_logging import shorten_lines
from robust_train.host.linux import signal_at_parents_death
from robust_train.host.signals import FORWARDED, SignalWatch, forwarded
from robust_train.model.errors import EXIT_BAD_CONFIG, ConfigError, JobInterrupted
from robust_train.model.events import ValueReported
from robust_train.report import html
from robust_train.report.status import LiveLines
from robust_train.sweep.pruning import Reports
from robust_train.sweep.record import (
    INTERRUPTIONS,
    Status,
    SweepJob,
    read_record,
    read_row,
    row_of,
)
from robust_train.sweep.session import fail_fast, prepare, session
from robust_train.sweep.table import screen_table, tally

log = logging.getLogger("robust_train")

LOG_FILE = "output.log"
_POLL_SECONDS = 0.1
_KILLED_SECONDS = 10.0
_REFRESH_SECONDS = 0.5


Job = tuple[int, Sequence[str]]
"""A job's number and its overrides."""


class Points(Protocol):
    """What a sweep runs."""

    most: int  # jobs in all
    prunes: bool  # whether :meth:`reported` may stop a job

    @property
    def is_over(self) -> bool:
        """Whether no more job will come, now that none runs here."""

    def next(self) -> Job | None:
        """Return a job to start now; None: there is none at this moment."""

    def reported(
        self,
        job: int,
        values: Sequence[ValueReported],
    ) -> str | None:
        """Take what a job has reported; return why it is stopped early, None if it is not."""

    def ended(self, row: SweepJob) -> None:
        """Take how a job that :meth:`next` has returned has ended."""


@dataclass
class RunningJob:
    """A job's process."""

    number: int
    folder: Path
    process: ForkProcess
    is_pruned: bool = False  # or about to be


class LiveTable(LiveLines):
    """Shows the jobs that run on a terminal; elsewhere nothing."""

    _next = 0.0

    @property
    def is_due(self) -> bool:
        """Whether there is a terminal, and half a second has passed."""
        return self._area is not None and time.monotonic() > self._next

    def show(
        self,
        rows: Sequence[SweepJob],
        values: Mapping[int, float],
    ) -> None:
        """Show the jobs as they are now, with what they have reported last."""
        from rich.text import Text

        self._next = time.monotonic() + _REFRESH_SECONDS
        if self._area is not None:
            most = self._area.size[1] - 2
            lines = [*screen_table(rows, values)[:most], tally(rows)]
            self._area.show([Text(line, style="dim") for line in lines])


class GpuQueue:
    """Runs a sweep's jobs side by side, ``n_jobs`` at once; None to choose."""

    def __init__(
        self,
        context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
        n_jobs: int | None,
    ) -> None:
        if (sweep := session.sweep) is None:
            raise ConfigError(
                "hydra/launcher=gpu_queue: this config has nothing of robust-train: build it on "
                "defaults: [robust], or use robust_train.hydra_main"
            )
        self._context, self._task_function = context, task_function
        self._config, self.sweep, self._n_jobs = config, sweep, n_jobs
        self._settings = unchecked(config)
        self.folder = sweep.folder
        self._points: Points
        self._reports: Reports
        # every job that is known, as it stands; the sweep's table has those that left no folder
        self.rows = sweep.known
        self._running: list[RunningJob] = []
        self._signals = SignalWatch()
        self._received: deque[int] = deque()  # handled between two steps
        self._is_stopping = False
        self._has_passed_on = False  # a signal
        self._killed_at = math.inf

    def run(
        self,
        points: Points,
        listed: Mapping[int, Sequence[str]],
    ) -> None:
        """Run jobs as ``points`` gives them, one as soon as another has ended. ``listed`` are
        known before. Raises JobInterrupted: a signal ended the sweep, after every job has ended."""
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        shorten_lines()
        discard_early()
        table = self.sweep.table
        prunes = points.prunes or self._settings.sweep_patience is not None
        wanted = "max" if table.sign > 0 else "min"
        self._points = points
        self._reports = Reports(self.folder, wanted if prunes else None)
        for number, overrides in listed.items():
            self.rows[number] = self._row(number, overrides)
        slots = jobs_at_once(
            self._settings,
            self._n_jobs,
            points.most,
            gpus=0 if self._n_jobs else count_gpus(self._settings),
            cpus=len(os.sched_getaffinity(0)),
        )
        with self._signals, LiveTable() as live:
            log.info(
                "%d jobs, %d at once; they print to %s",
                points.most,
                slots,
                self.folder / "*" / LOG_FILE,
            )
            with self._signals.handed_to(self._received.append):
                try:
                    goes_on = self._fill(slots)
                    html.prepare()  # while the first jobs start: a later one is a fork
                    while goes_on:
                        self._poll(live)
                        goes_on = self._fill(slots)
                finally:
                    self._end_all(live)
            if self._signals.received is not None:
                # one more must not cost the table: until the sweep is finished
                signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTIONS)
            self._signals.raise_if_received()

    def _fill(self, slots: int) -> bool:
        """Start jobs while there is room; return whether the sweep goes on."""
        while not (is_over := self._is_stopping or bool(self._received)):
            most = requested_max_jobs(self.folder)  # robust-train sweep max-jobs
            if len(self._running) >= (slots if most is None else most):
                break
            if (found := self._points.next()) is None:
                break
            self._start(*found)
        return bool(self._running) or not (is_over or self._points.is_over)

    def _start(self, number: int, overrides: Sequence[str]) -> None:
        """Start a job's process, unless the job completed earlier."""
        loader = self._context.config_loader
        config = loader.load_sweep_config(self._config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
        folder = _run_folder(config)
        row = replace(self._row(number, overrides), folder=str(folder))
        job = prepare(config, folder)
        if job.refusal is not None:
            log.error("job %d refused: %s", number, job.refusal)
            self._ended(row.ended(Status.REFUSED, EXIT_BAD_CONFIG, job.refusal))
            return
        if not job.runs:
            self._ended(row_of(job.record or row, folder))
            return
        self._reports.begin(number, folder)
        process = start_job(
            partial(self._work, config),
            folder / LOG_FILE,
            self._detach,
        )
        self.rows[number] = replace(row, status="starting")
        self._running.append(RunningJob(number, folder, process))
        same = self.sweep.table.overrides
        own = [one for one in public_command(row.overrides) if one not in same]
        log.info("job %d starts: %s", number, " ".join(own))

    def _row(self, number: int, overrides: Sequence[str]) -> SweepJob:
        """Return the row of a job that has not started."""
        table = self.sweep.table
        return SweepJob(
            number,
            tuple(filter_overrides(overrides)),
            table.sweep,
            Status.NOT_STARTED,
            trial=number // table.repeat,
        )

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

    def _poll(self, live: LiveTable) -> None:
        """Wait a moment; then handle signals and jobs that have ended."""
        self.sweep.take_over()
        if live.is_due:
            self._show(live)
        # until a job ends: its GPU is free, and the next one takes some time to start
        wait([job.process.sentinel for job in self._running], _POLL_SECONDS)
        while self._received:
            self._pass_on(self._received.popleft())
        if not self._is_stopping and sweep_stop_requested(self.folder):
            self._is_stopping = True  # the jobs see it as well
            log.info("the sweep is stopped: no more jobs start, running ones end")
        for job in list(self._running):
            code = job.process.exitcode
            self._read_reports(job)
            if code is not None:
                job.process.close()  # or a long sweep runs out of descriptors
                self._running.remove(job)
                self._settle(job, code)

    def _show(self, live: LiveTable) -> None:
        """Show how far the jobs are that run."""
        rows = dict(self.rows)
        for job in self._running:
            row = read_row(job.folder)
            # before it has its folder's lock it looks as if it had died
            if row is not None and row.status != Status.DIED:
                rows[job.number] = row
        live.show(list(rows.values()), self._reports.last)

    def _read_reports(self, job: RunningJob) -> None:
        """Stop a job that does worse than others at the same step."""
        values = self._reports.new(job.number, job.folder)
        if not values or job.is_pruned or self._is_stopping:
            return
        patience = self._settings.sweep_patience
        reason = self._points.reported(job.number, values)
        if reason is None and self._reports.is_behind(job.number, patience):
            reason = f"worse than another job at {patience} reports in a row"
        if reason is not None:
            with contextlib.suppress(OSError):
                request_pruning(job.folder, reason)
                job.is_pruned = True

    def _settle(self, job: RunningJob, returncode: int) -> None:
        """Take how a job has ended; record it if the job could not."""
        own = replace(self.rows[job.number], status=Status.STARTED)
        row = row_of(read_record(job.folder) or own, job.folder, returncode)
        with contextlib.suppress(OSError):  # a disk that takes nothing
            row.write(job.folder)
        self._ended(row)
        line = f"job {row.job} {row.status}"
        if row.has_completed and row.wall_seconds is not None:
            line += f" in {row.wall_seconds:.1f} s"
        elif row.reason is not None:
            line += f": {' '.join(row.reason.split())}; {job.folder / LOG_FILE}"
        log.info("%s", line)
        if not self._is_stopping:
            fail_fast(self._settings, row, self.folder)

    def _ended(self, row: SweepJob) -> None:
        self.rows[row.job] = row
        self._points.ended(row)

    def _pass_on(self, signum: int) -> None:
        """Pass the first signal on to the jobs; a second one kills them."""
        if self._has_passed_on:
            signum = signal.SIGKILL
            self._killed_at = time.monotonic()
        else:
            log.info("stopping: each job saves a checkpoint; Ctrl-C again kills them")
        self._has_passed_on = True
        self._stop(signum)

    def _stop(self, signum: int) -> None:
        self._is_stopping = True
        for job in self._running:
            if job.process.exitcode is None and job.process.pid is not None:
                # one that it has received as well counts once
                os.kill(job.process.pid, forwarded(signum))

    def _end_all(self, live: LiveTable) -> None:
        """Leave no job behind, except processes that even SIGKILL does not end."""
        if self._running and not self._is_stopping:  # an error ends the sweep
            self._stop(signal.SIGTERM)
        while self._running:
            self._poll(live)
            if time.monotonic() > self._killed_at + _KILLED_SECONDS:
                numbers = ", ".join(str(job.number) for job in self._running)
                line = "left behind: the processes of jobs %s do not end when killed"
                log.error(line, numbers)
                return


def start_job(
    work: Callable[[], int],
    log_path: Path,
    detach: Callable[[], None],
) -> ForkProcess:
    """Start a process that prints to ``log_path``, calls ``detach`` and then ``work``, which
    returns the exit code.

    A fork without torch, because the task function may live in a script that cannot be imported.
    """
    with contextlib.suppress(ValueError):  # outside the main thread
        # ignored by whoever has started the sweep, it would cost the exit codes
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # no signal may come between the fork and the child's own handlers
    signals = (*FORWARDED, *FORWARDED.values())
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def be_the_job(parent: int) -> None:
        os.setsid()  # a terminal's Ctrl-C is for the sweep, which passes it on
        signal_at_parents_death(signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.devnull, "rb") as nothing, log_path.open("ab") as log_file:
            os.dup2(nothing.fileno(), 0)
            os.dup2(log_file.fileno(), 1)
            os.dup2(log_file.fileno(), 2)
        detach()
        for signum in FORWARDED:
            signal.signal(signum, _receive)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        try:
            code = work()
        except JobInterrupted as error:
            code = error.exit_code
        except KeyboardInterrupt:
            code = 130
        raise SystemExit(code)

    process = multiprocessing.get_context("fork").Process(
        target=be_the_job,
        args=(os.getpid(),),
    )
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return process


def _receive(signum: int, frame: FrameType | None) -> None:
    """Act as the forwarded signal does, while no job watches them."""
    os.kill(os.getpid(), FORWARDED[signum])


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
    if not (child := os.fork()):
        with contextlib.suppress(BaseException):
            found = visible_gpus(read_inventory(processes=False), os.environ)
            answer = str(len(found.gpus)) if found.inventory.answered else "?"
            os.write(write_end, answer.encode())
        os._exit(0)
    os.close(write_end)
    answer = os.read(read_end, 16).decode() or "0"
    os.close(read_end)
    if answer == "?":  # the driver is not waited for any longer
        log.warning(
            "the NVIDIA driver has not answered and may be wedged: this sweep does not count its "
            "GPUs; hydra.launcher.n_jobs chooses how many jobs run at once"
        )
        return 0
    os.waitpid(child, 0)
    takes_any = wanted.picks_gpu or wanted.device in ("auto", "cuda")
    return int(answer) if takes_any else min(1, int(answer))
