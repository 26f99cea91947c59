"""``hydra/launcher=gpu_queue``: a sweep's jobs side by side, each in a process of its own.

Which GPU a job gets is not decided here: every job waits for its own, as it would alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

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

from robust_train.execution import at_hand
from robust_train.execution.signals import SignalWatch
from robust_train.runfolder.requests import sweep_stop_requested
from robust_train.sweep import current, session
from robust_train.sweep.capacity import count_cpus, count_gpus, jobs_at_once
from robust_train.sweep.endings import ending_line, ending_of_process, zygote_line
from robust_train.sweep.folders import LOG_FILE, remove_untouched, run_folder
from robust_train.sweep.job_process import JobProcess
from robust_train.sweep.live_table import REFRESH_SECONDS, LiveRow, LiveTable
from robust_train.sweep.plugins_of_others import no_objective
from robust_train.sweep.progress import JournalFollower, Progress
from robust_train.sweep.record import (
    COMPLETED,
    NOT_STARTED,
    REFUSED,
    STARTED,
    Entry,
    JobRecord,
    read_json,
    read_record,
)
from robust_train.sweep.rows import Row, read_row
from robust_train.sweep.table import differing_overrides

log = logging.getLogger("robust_train")

_LOOK_ANYWAY_SECONDS = 5.0
_CALM_AFTER_SECONDS = 10.0
_LOOK_WITHOUT_SIGNALS_SECONDS = 0.2


@dataclass
class _Job:
    """A job of the sweep. ``overrides`` are the sweeper's, ``shown`` those that tell it apart."""

    number: int
    overrides: Sequence[str]
    shown: str
    config: DictConfig | None = None
    folder: Path | None = None
    process: JobProcess | None = None
    journal: JournalFollower | None = None
    result: JobReturn | None = None
    status: str = "pending"

    def row(self) -> LiveRow:
        progress = Progress() if self.journal is None else self.journal.look()
        if self.status != "running" or progress.status == "pending":
            progress = replace(
                progress, status="starting" if self.status == "running" else self.status
            )
        return LiveRow(self.number, self.shown, progress)


class GpuQueue:
    """Runs one batch of a sweeper's jobs.

    Args:
        context: how configs are composed.
        task_function: what a job runs.
        config: the sweep's own config.
        n_jobs: how many run at once, None to choose.
    """

    def __init__(
        self,
        context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
        n_jobs: int | None,
    ) -> None:
        self._context = context
        self._task_function = task_function
        self._config = config
        self._n_jobs = n_jobs
        self._fail_fast = bool(OmegaConf.select(config, "sweep_fail_fast", default=False))
        self._signals = SignalWatch()
        self._pending: deque[_Job] = deque()
        self._on_deck: _Job | None = None
        self._running: list[_Job] = []
        self._jobs: list[_Job] = []
        self._stopping: str | None = None
        # taken from here between two steps: a handler would find a job half started
        self._received: deque[int] = deque()
        self._last_start = 0.0

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> list[JobReturn]:
        """Run the jobs; their results in order, NaN for one that did not complete.

        Raises:
            JobInterrupted: a signal ended the sweep; every job was told and has ended.
        """
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        Path(str(self._config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        if OmegaConf.select(self._config, "isolation") == "process":
            at_hand.share()
        else:
            at_hand.discard()
        shown = differing_overrides([filter_overrides(own) for own in job_overrides])
        self._jobs = [
            _Job(initial_job_idx + index, overrides, " ".join(shown[index]))
            for index, overrides in enumerate(job_overrides)
        ]
        self._pending.extend(self._jobs)
        for job in self._jobs:
            self._note(job, NOT_STARTED)
        slots = self._slots()
        log.info("%d jobs, %d at once", len(self._jobs), slots)
        with _child_signals(), self._signals, LiveTable() as table:
            with self._signals.handed_to(self._received.append) as wakeup:
                try:
                    self._run(slots, wakeup, table)
                finally:
                    self._end_all(wakeup, table)
            self._signals.raise_if_received()
        return [job.result or self._no_result(job) for job in self._jobs]

    def _slots(self) -> int:
        return jobs_at_once(
            self._n_jobs,
            jobs=len(self._jobs),
            gpus=0 if self._n_jobs else count_gpus(self._config),
            jobs_per_gpu=OmegaConf.select(self._config, "gpu_jobs_per_device", default=1),
            gpus_per_job=OmegaConf.select(self._config, "num_gpus", default=1),
            cpus=count_cpus(),
        )

    def _run(self, slots: int, wakeup: int, table: LiveTable) -> None:
        while True:
            self._fill(slots, table)
            if not self._running:
                return
            self._wait(wakeup, table)

    def _fill(self, slots: int, table: LiveTable) -> None:
        """Start as many jobs as may run, and one more that waits for its turn."""
        while self._stopping is None and not self._received:
            is_full = len(self._running) >= slots
            if self._on_deck is None and (not is_full or self._is_calm()):
                self._on_deck = self._prepare_next(table)
            if self._on_deck is None or is_full:
                return
            job, self._on_deck = self._on_deck, None
            assert job.process is not None
            job.status = "running"
            self._running.append(job)
            self._last_start = time.monotonic()
            job.process.go()
            table.say(f"job {job.number} starts: {job.shown}; {job.folder}/{LOG_FILE}")

    def _is_calm(self) -> bool:
        """Whether one more process, which may import torch, keeps no job from starting."""
        if time.monotonic() >= self._last_start + _CALM_AFTER_SECONDS:
            return True
        return all(job.row().progress.status == "running" for job in self._running)

    def _prepare_next(self, table: LiveTable) -> _Job | None:
        """The next job that is to be run, its process forked."""
        while self._pending and not self._received:
            job = self._pending.popleft()
            job.config = self._compose(job)
            job.folder = run_folder(job.config)
            if any(job.folder == other.folder for other in self._jobs if other is not job):
                self._refuse(job, table)
                continue
            entry, record = current.plan(job.config, job.folder)
            if entry is Entry.REUSE:
                current.reuse(record, job.folder)
                job.status = COMPLETED
                job.result = self._return(job, record.objective)
                continue
            job.journal = JournalFollower(job.folder / "journal.jsonl")
            job.process = JobProcess(
                partial(self._work, job),
                job.folder / LOG_FILE,
                warm=OmegaConf.select(job.config, "isolation") == "process",
                detach=self._detach,
            )
            return job
        return None

    def _refuse(self, job: _Job, table: LiveTable) -> None:
        """Two jobs in one folder would write over each other."""
        reason = f"{job.folder} is another job's; hydra.sweep.subdir must tell the jobs apart"
        self._note(job, REFUSED, exit_code=2, reason=reason)
        table.say(f"job {job.number} refused: {reason}", level=logging.ERROR)
        job.folder, job.status = None, REFUSED

    def _compose(self, job: _Job) -> DictConfig:
        config = self._context.config_loader.load_sweep_config(self._config, list(job.overrides))
        with open_dict(config):
            config.hydra.job.id = job.number
            config.hydra.job.num = job.number
        return config

    def _work(self, job: _Job) -> tuple[JobReturn, int]:
        """Runs in the job's process."""
        assert job.config is not None
        result = run_job(
            hydra_context=self._context,
            task_function=self._task_function,
            config=job.config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        if result.status is JobStatus.COMPLETED:
            return result, 0
        traceback.print_exception(result._return_value)
        result.return_value = no_objective(job.config.hydra)
        result.status = JobStatus.COMPLETED
        return result, 1

    def _detach(self) -> None:
        """Runs in the job's process: the sweep's handlers and the other jobs are not its own."""
        signal.set_wakeup_fd(-1)
        self._signals.__exit__(None, None, None)
        for job in self._jobs:
            if job.process is not None:
                job.process.close()

    def _wait(self, wakeup: int, table: LiveTable) -> None:
        """Until something happens; then see which jobs have ended."""
        table.show([job.row() for job in self._jobs])
        may_prepare = self._on_deck is None and bool(self._pending)
        timeout = REFRESH_SECONDS if table.is_live or may_prepare else _LOOK_ANYWAY_SECONDS
        if threading.current_thread() is not threading.main_thread():
            timeout = _LOOK_WITHOUT_SIGNALS_SECONDS
        with selectors.DefaultSelector() as selector:
            for descriptor in (wakeup, *at_hand.zygote_output()):
                selector.register(descriptor, selectors.EVENT_READ)
            selector.select(timeout)
            with contextlib.suppress(BlockingIOError):
                os.read(wakeup, 4096)
        _look_after_zygote(table)
        self._pass_on_signals()
        if self._stopping is None and sweep_stop_requested(Path(self._config.hydra.sweep.dir)):
            self._stopping = "request"  # which the jobs see as well
            table.say("robust-train run stop: no more jobs are started, those that run end")
        for job in [job for job in self._running if job.process and job.process.poll() is not None]:
            self._running.remove(job)
            self._take_result(job, table)

    def _take_result(self, job: _Job, table: LiveTable) -> None:
        assert job.process is not None
        assert job.folder is not None
        row = self._settled(job, job.folder, job.process.returncode or 0)
        completed = row.status == COMPLETED
        result = job.process.result() if completed else None
        job.process.close()
        job.status = row.status
        if not isinstance(result, JobReturn):  # it may have died with its work done
            objective = row.result if completed else no_objective(self._config.hydra)
            result = self._return(job, objective)
        job.result = result
        table.say(ending_line(row, job.folder / LOG_FILE))
        if self._fail_fast and not completed and self._stopping is None:
            self._stop("sweep_fail_fast=true", signal.SIGTERM)
            table.say("sweep_fail_fast=true: no more jobs are started, those that run are ended")

    def _settled(self, job: _Job, folder: Path, returncode: int) -> Row:
        """The row of a job whose process has ended, which may have left nothing that says how."""
        assert job.config is not None
        own = current.identity(job.config)
        record = read_record(folder)
        is_known = record is not None and record.sweep == own.sweep
        if not is_known or (record is not None and record.status == STARTED):
            summary = read_json(folder / "summary.json") if is_known else None
            if summary is None:
                with contextlib.suppress(OSError):
                    ending_of_process(own, returncode).write(folder)
        return replace(read_row(folder), job=job.number)

    def _pass_on_signals(self) -> None:
        """The first is passed on to the jobs; another one ends them at once."""
        while self._received:
            signum = self._received.popleft()
            self._stop("signal", signal.SIGKILL if self._stopping == "signal" else signum)

    def _stop(self, why: str, signum: int) -> None:
        self._stopping = why
        for job in self._running:
            if job.process is not None:
                job.process.signal(signum)

    def _end_all(self, wakeup: int, table: LiveTable) -> None:
        """Leave no job behind, whatever the reason for the end."""
        if self._on_deck is not None and self._on_deck.process is not None:
            self._on_deck.process.discard()
            remove_untouched(self._on_deck.folder)
            self._on_deck.folder = None
            self._on_deck.status = "pending"
        if self._running and self._stopping is None:
            self._stop("an error", signal.SIGTERM)
        while self._running:
            self._wait(wakeup, table)

    def _no_result(self, job: _Job) -> JobReturn:
        return self._return(job, no_objective(self._config.hydra))

    def _return(self, job: _Job, value: Any) -> JobReturn:
        """What the sweeper gets for a job that did not send its own."""
        config = job.config if job.config is not None else self._compose(job)
        task_config = config.copy()
        with open_dict(task_config):
            del task_config["hydra"]
        return JobReturn(
            overrides=list(config.hydra.overrides.task),
            cfg=task_config,
            hydra_cfg=OmegaConf.masked_copy(config, "hydra"),
            working_dir=os.getcwd(),
            task_name=str(config.hydra.job.name),
            status=JobStatus.COMPLETED,
            _return_value=value,
        )

    def _note(self, job: _Job, status: str, **fields: Any) -> None:
        """Have the job in the sweep's table even if it never leaves anything in a folder."""
        sweep = session.current_sweep()
        if sweep is not None:
            overrides = tuple(filter_overrides(job.overrides))
            sweep.planned[job.number] = JobRecord(
                sweep.id, job.number, overrides, status=status, **fields
            )


def _look_after_zygote(table: LiveTable) -> None:
    printed, returncode = at_hand.watch_zygote()
    for line in printed.splitlines():
        table.say(line)
    if returncode is not None:
        table.say(zygote_line(returncode), level=logging.WARNING)


@contextlib.contextmanager
def _child_signals() -> Any:
    """The end of a job's process wakes the launcher, as every signal with a handler does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, previous)
