"""``hydra/launcher=gpu_queue``: a sweep's jobs side by side, each in a process of its own.

Hydra's launcher plugin or one of our sweepers creates :class:`GpuQueue` in the sweep's process. It
decides how many jobs run at once. Each job's own launcher decides on which GPU the job runs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType

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
from robust_train.config.schema import RobustConfig
from robust_train.folder.requests import (
    request_pruning,
    requested_sweep_limit,
    sweep_stop_requested,
)
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.visible import visible_gpus
from robust_train.host.job_logging import shorten_lines
from robust_train.host.linux import signal_at_parents_death
from robust_train.host.loggers import show_lines
from robust_train.host.signals import FORWARDED, SignalWatch, signal_to_forward
from robust_train.model.errors import ConfigError
from robust_train.model.events import ValueReported
from robust_train.report import html
from robust_train.report.status import LiveLines
from robust_train.sweep.checks import hydra_knows, speak_of_keys_in
from robust_train.sweep.packing import GpuMemory, Packer, largest_first
from robust_train.sweep.pruning import Reports
from robust_train.sweep.record import (
    INTERRUPTIONS,
    Status,
    SweepJob,
    is_anothers,
    job_folders,
    of_jobs,
    read_record,
    read_row,
    row_of,
)
from robust_train.sweep.session import fail_fast, prepare, session, sweep_folder_of
from robust_train.sweep.table import screen_table, tally, without

log = logging.getLogger("robust_train")

LOG_FILE = "output.log"
_POLL_SECONDS = 0.1
_KILLED_SECONDS = 10.0
_REFRESH_SECONDS = 0.5


class Jobs:
    """The jobs of a sweep. ``listed`` has their overrides by number. A search adds jobs singly."""

    prunes = False
    """Whether `reported` may stop a job."""

    def __init__(self, listed: Mapping[int, Sequence[str]]) -> None:
        self.listed = listed
        self.most = len(listed)
        self._waiting = dict(listed)

    @property
    def is_over(self) -> bool:
        """Whether the sweep has no more jobs to start. Only read while no job runs."""
        return not self._waiting

    def next(self) -> tuple[int, Sequence[str]] | None:
        """Return a job to start now, and its overrides, or None."""
        number = next(iter(self._waiting), None)
        return None if number is None else (number, self._waiting.pop(number))

    def reported(self, job: int, values: Sequence[ValueReported]) -> str:
        """Read a job's reports. Return the reason to stop it early, empty if there is none."""
        return ""

    def ended(self, row: SweepJob) -> None:
        """Take note of a job that has ended."""


class GpuQueue:
    """Runs a sweep's jobs side by side, ``n_jobs`` at once. None chooses the number."""

    def __init__(
        self,
        context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
        n_jobs: int | None,
    ) -> None:
        if session.sweep is None:
            raise ConfigError(
                "hydra/launcher=gpu_queue: this config has nothing of robust-train: use "
                "robust_train.hydra_main, or build it on defaults: [robust], with "
                "hydra.searchpath: [pkg://robust_train.configs]"
            )
        self._context = context
        self._task_function = task_function
        self._config = config
        self._n_jobs = n_jobs
        self._settings = unchecked(config)
        self.sweep = session.sweep
        self.folder = session.sweep.folder
        # the latest row of each job; the sweep's table needs it for jobs that left no folder
        self.rows = session.sweep.known
        self._jobs: Jobs
        self._reports: Reports
        self._packer: Packer | None = None  # if jobs share GPUs as they fit
        self._running: dict[int, ForkProcess] = {}
        self._pruned: set[int] = set()  # jobs that were requested to end early
        self._signals = SignalWatch()
        self._received: deque[int] = deque()  # handled between two steps
        self._is_stopping = False
        self._has_passed_on = False  # whether a signal has been sent to the jobs
        self._killed_at = math.inf
        self._next_show = 0.0

    def launch(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
        """Run a sweeper's batch of jobs, and return their results in order, NaN for a job that did
        not complete. Raises as `run` does."""
        listed = dict(enumerate(job_overrides, first))
        self.run(self.in_order(listed))
        returned = []
        for number in listed:
            row = self.rows[number]
            job = JobReturn(overrides=row.overrides, status=JobStatus.COMPLETED)
            job.return_value = row.objective
            returned.append(job)
        return returned

    def in_order(self, listed: Mapping[int, Sequence[str]]) -> Jobs:
        """Return jobs in the order of their numbers, or the largest first if they share GPUs."""
        return Jobs(largest_first(listed) if self._settings.packs_gpus else listed)

    def run(self, jobs: Jobs) -> None:
        """Run jobs, each as soon as another has ended. Raises JobInterrupted, after all jobs have
        ended, if a signal ended the sweep."""
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        shorten_lines()
        show_lines()
        speak_of_keys_in(self._config)
        discard_early()
        table = self.sweep.table
        prunes = jobs.prunes or self._settings.sweep_patience is not None
        self._jobs = jobs
        self._reports = Reports(table.direction[:3] if prunes else "")
        for number, overrides in jobs.listed.items():
            self.rows[number] = self._not_started(number, overrides)
        for folder in job_folders(self.folder) if prunes else ():
            record = read_record(folder)
            if record is not None:
                row = self.rows.get(record.job)
                # the folder may hold jobs of other sweeps
                if record.sweep == table.sweep or (row and row.varies_as(record)):
                    self._reports.begin(record.job, folder)
        gpus = {} if self._n_jobs else read_memory(self._settings)
        slots = jobs_at_once(
            self._settings,
            self._n_jobs,
            jobs.most,
            gpus=len(gpus),
            cpus=len(os.sched_getaffinity(0)),
        )
        if self._settings.packs_gpus and not self._n_jobs:
            self._packer = Packer(self._settings, slots, gpus, partial(read_memory, self._settings))
        with self._signals, LiveLines() as live:
            log.info(
                "%d jobs, %d at once; they print to %s",
                jobs.most,
                slots,
                self.folder / "*" / LOG_FILE,
            )
            with self._signals.hand_signals_to(self._received.append):
                try:
                    self._signals.raise_if_received()
                    goes_on = self._fill(slots)
                    # while the first jobs start: later jobs are forks, and need not import it
                    html.prepare()
                    while goes_on:
                        self._poll(live)
                        goes_on = self._fill(slots)
                except BaseException:
                    if not self._is_stopping:
                        self._stop(signal.SIGTERM)
                    while self._running:
                        self._poll(live)
                    raise
            if self._signals.received:
                # until the sweep is finished: another signal would prevent its table
                signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTIONS)
            self._signals.raise_if_received()

    def _not_started(self, number: int, overrides: Sequence[str]) -> SweepJob:
        """Return a job of this sweep before it has started."""
        table = self.sweep.table
        return SweepJob(
            number,
            tuple(filter_overrides(overrides)),
            table.sweep,
            Status.NOT_STARTED,
            trial=number // table.repeat,
        )

    def _fill(self, slots: int) -> bool:
        """Start jobs while there is room, and return whether the sweep continues."""
        while not (is_over := self._is_stopping or bool(self._received)):
            # robust-train sweep limit
            most = requested_sweep_limit(self.folder)
            if self._packer is not None:
                slots = self._packer.packing.limit
            if len(self._running) >= (slots if most is None else most):
                break
            next_job = self._jobs.next()
            if next_job is None:
                break
            number, overrides = next_job
            self._start(number, overrides)
        return bool(self._running) or not (is_over or self._jobs.is_over)

    def _start(self, number: int, overrides: Sequence[str]) -> None:
        """Start a job's process, unless the job completed earlier."""
        loader = self._context.config_loader
        try:
            config = loader.load_sweep_config(self._config, list(overrides))
        except REFUSALS as error:
            # a file was edited since the sweep was checked, or there were too many values to check
            reason = explain_job(error, self._config, overrides)
            log.error("job %d refused: %s", number, reason)
            self._ended(self._not_started(number, overrides).refused(reason))
            return
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
        with hydra_knows(config):
            at = sweep_folder_of(config) / str(config.hydra.sweep.subdir)
        folder = Path(os.path.abspath(at))
        job = prepare(config, folder)
        self._reports.begin(number, folder)
        if not job.is_running:
            if job.status == Status.REFUSED:
                log.error("job %d refused: %s", number, job.reason)
            self._ended(row_of(job, folder))
            return
        self._running[number] = start_job(
            partial(self._work, config), folder / LOG_FILE, self._signals.__exit__
        )
        self.rows[number] = replace(job, status="starting")
        differing = without(of_jobs(job.overrides), self.sweep.table.overrides)
        log.info("job %d starts: %s", number, differing)

    def _work(self, config: DictConfig) -> int:
        """Run a job, in its own process."""
        settings = unchecked(config)
        # while Hydra prepares the job and a GPU is found
        if not settings.runs_inline:
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
        traceback.print_exception(unwrap_job_return(result))
        return 1

    def _poll(self, live: LiveLines) -> None:
        """Wait a moment, then handle signals and jobs that have ended."""
        self._show(live)
        if self._packer is not None:
            self._packer.look([self.rows[number].path for number in self._running])
        # no longer than until a job ends: its GPU is free, and the next job starts slowly
        wait([process.sentinel for process in self._running.values()], _POLL_SECONDS)
        while self._received:
            self._pass_on(self._received.popleft())
        if not self._is_stopping and self._has_lost_folder():
            self._is_stopping = True  # the end says why
        if not self._is_stopping and sweep_stop_requested(self.folder):
            self._is_stopping = True  # the jobs see it as well
            log.info("the sweep is stopped: no more jobs start, running ones end")
        for number, process in list(self._running.items()):
            code = process.exitcode
            self._read_reports(number)
            if code is not None:
                process.close()  # or a long sweep runs out of descriptors
                del self._running[number]
                self._settle(number, code)
        if self._running and time.monotonic() > self._killed_at + _KILLED_SECONDS:
            numbers = ", ".join(map(str, self._running))
            line = "left behind: the processes of jobs %s do not end when killed"
            log.error(line, numbers)
            self._running.clear()

    def _show(self, live: LiveLines) -> None:
        """Show the progress of the running jobs on a terminal, twice a second."""
        if live.area is None or time.monotonic() < self._next_show:
            return
        self._next_show = time.monotonic() + _REFRESH_SECONDS
        rows = dict(self.rows)
        for number in self._running:
            row = read_row(rows[number].path)
            # a job without its folder's lock yet looks as if it had died
            if row is not None and row.status != Status.DIED:
                rows[number] = row
        shown = list(rows.values())
        most = live.area.size[1] - 2
        lines = screen_table(shown, self._reports.last)
        live.draw([*lines[:most], tally(shown)])

    def _read_reports(self, number: int) -> None:
        """Stop a job that does worse than others at the same step."""
        folder = self.rows[number].path
        values = self._reports.new(number, folder)
        if not values or number in self._pruned or self._is_stopping:
            return
        patience = self._settings.sweep_patience or 0
        reason = self._jobs.reported(number, values)
        if not reason and self._reports.is_behind(number, patience):
            reason = f"worse than another job at {patience} reports in a row"
        if reason:
            with contextlib.suppress(OSError):
                request_pruning(folder, reason)
                self._pruned.add(number)

    def _settle(self, number: int, returncode: int) -> None:
        """Handle the end of a job, and record it if the job could not."""
        folder = self.rows[number].path
        started = replace(self.rows[number], status=Status.STARTED)
        if self._has_lost_folder():
            row = row_of(started, Path(), returncode)
        else:
            row = row_of(read_record(folder) or started, folder, returncode)
            row.write(folder)
        line = f"job {row.job} {row.status}"
        if row.has_completed and row.wall_seconds is not None:
            line += f" in {row.wall_seconds:.1f} s"
        elif row.reason is not None:
            line += f": {' '.join(row.reason.split())}; {folder / LOG_FILE}"
        log.info("%s", line)
        self._ended(row)

    def _ended(self, row: SweepJob) -> None:
        """Take the row of a job that has ended. Its failure may end the sweep."""
        self.rows[row.job] = row
        if self._has_lost_folder():
            return
        self._jobs.ended(row)
        if not self._is_stopping:
            fail_fast(self._settings, row, self.folder)

    def _has_lost_folder(self) -> bool:
        """Return whether another sweep has taken the folder, so that its records are not ours."""
        return is_anothers(self.folder, self.sweep.table.sweep)

    def _pass_on(self, signum: int) -> None:
        """Pass the first signal on to the jobs. A second signal kills them."""
        if self._has_passed_on:
            signum = signal.SIGKILL
            self._killed_at = time.monotonic()
        else:
            log.info("stopping: each job saves a checkpoint; Ctrl-C again kills them")
        self._has_passed_on = True
        self._stop(signum)

    def _stop(self, signum: int) -> None:
        self._is_stopping = True
        for process in self._running.values():
            if process.exitcode is None and process.pid is not None:
                # a signal that the job has received directly as well counts once
                os.kill(process.pid, signal_to_forward(signum))


def start_job(work: Callable[[], int], log_path: Path, detach: Callable[[], None]) -> ForkProcess:
    """Start a process that prints to ``log_path``, drops its parent's handlers with ``detach`` and
    calls ``work``, which returns the exit code.

    A fork without torch, because the task function may live in a script that cannot be imported.
    """
    with contextlib.suppress(ValueError):  # outside the main thread
        # an ignored SIGCHLD, inherited from whoever started the sweep, would cost the exit codes
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
        signal.set_wakeup_fd(-1)
        detach()
        for signum in FORWARDED:
            signal.signal(signum, _receive)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        try:
            code = work()
        except KeyboardInterrupt as error:  # JobInterrupted among them
            code = getattr(error, "exit_code", 130)
        raise SystemExit(code)

    process = multiprocessing.get_context("fork").Process(target=be_the_job, args=(os.getpid(),))
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return process


def _receive(signum: int, frame: FrameType | None) -> None:
    """Act like the original of a forwarded signal, while no `SignalWatch` is active."""
    os.kill(os.getpid(), FORWARDED[signum])


def jobs_at_once(
    wanted: RobustConfig, n_jobs: int | None, jobs: int, *, gpus: int, cpus: int
) -> int:
    """Return how many of a sweep's ``jobs`` run side by side.

    Without ``n_jobs``, as many run as fit on the GPUs: more would only wait for their siblings, and
    use up their ``gpu_wait_timeout_minutes``. Without GPUs, the number is half that of the CPU
    cores, because a job on the CPU uses several.
    """
    on_gpus = gpus * wanted.gpu_jobs_per_device // wanted.num_gpus
    if not n_jobs:
        n_jobs = on_gpus if gpus else cpus // 2
    return max(1, min(n_jobs, jobs))


def read_memory(wanted: RobustConfig) -> Mapping[str, GpuMemory]:
    """Return the memory of the GPUs that a sweep's jobs may take, by UUID; empty if the driver
    hangs.

    Read in a fork: the jobs, which are forks too, must not inherit NVML's state.
    """
    if wanted.device == "cpu" and not wanted.picks_gpu:
        return {}
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os.close(read_end)
            visible = visible_gpus(read_inventory(processes=False), os.environ)
            sizes = {gpu.uuid: (gpu.total_bytes, gpu.used_bytes) for gpu in visible.gpus}
            answer = json.dumps(sizes if visible.inventory.answered else None)
            with open(write_end, "w") as pipe:
                pipe.write(answer)
        os._exit(0)
    os.close(write_end)
    with open(read_end) as pipe:
        answer = pipe.read() or "{}"
    given = json.loads(answer)
    if given is None:  # the driver hangs, so the child is not waited for
        log.warning(
            "the NVIDIA driver has not answered and may be wedged: this sweep does not count its "
            "GPUs; hydra.launcher.n_jobs chooses how many jobs run at once"
        )
        return {}
    os.waitpid(child, 0)
    gpus = {str(uuid): GpuMemory(*sizes) for uuid, sizes in given.items()}
    if wanted.picks_gpu or wanted.device in ("auto", "cuda"):
        return gpus
    return dict(list(gpus.items())[:1])
