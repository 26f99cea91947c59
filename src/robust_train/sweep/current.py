"""This process's job of a sweep: whether it runs, and how it ended."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from robust_train.files import set_aside
from robust_train.runfolder.lock import refusal
from robust_train.runfolder.requests import sweep_stop_requested
from robust_train.runfolder.summary import read_summary
from robust_train.settings import early_settings, sweep_folder
from robust_train.sweep.job_record import (
    COMPLETED,
    NOT_STARTED,
    REFUSED,
    STARTED,
    Entry,
    JobRecord,
    decide,
    read_record,
)
from robust_train.sweep.plugins_of_others import misplaced_launcher, no_objective
from robust_train.sweep.sweep_table import has_failed

log = logging.getLogger("robust_train")

# what Hydra has just put there for the new job: its folder and open log files
OF_HYDRA = re.compile(r"\.hydra|(?!attempt-\d+\.).*\.log")
SWEEP_VARIABLE = "ROBUST_TRAIN_SWEEP"
"""The id of this launch of a sweep, for the processes that launchers start for its jobs."""


@dataclass
class CurrentJob:
    """A job that Hydra has entered."""

    folder: Path  # its run folder
    record: JobRecord | None = None  # its record, None outside of a sweep
    runs: bool = True  # whether it is to be run; else its objective is known already
    refusal: str | None = None  # why it must not be run at all

    @property
    def objective(self) -> Any:
        """The sweeper's value of a job that is not run."""
        if self.record is not None and self.record.reused:
            return self.record.objective
        return no_objective(HydraConfig.get())

    def ended(
        self, status: str, exit_code: int, *, reason: str | None = None, objective: Any = None
    ) -> None:
        """Record the job's end. The first call counts."""
        if self.record is not None and self.record.status == STARTED:
            self.record = replace(
                self.record, status=status, exit_code=exit_code, reason=reason, objective=objective
            )
            _write(self.record, self.folder)


_current: CurrentJob | None = None


def current_job() -> CurrentJob | None:
    """Return the job that this process is in; None where Hydra runs without our callback."""
    return _current


def leave() -> None:
    """Forget the job."""
    global _current
    _current = None


def enter(config: DictConfig, launcher: str | None, *, follows: bool = False) -> None:
    """Decide whether a job that Hydra enters runs and prepare its folder; not if it ``follows``."""
    global _current
    in_sweep = config.hydra.mode == RunMode.MULTIRUN
    _current = job = CurrentJob(Path(str(config.hydra.runtime.output_dir)))
    job.refusal = misplaced_launcher(
        str(config.hydra.runtime.choices.get("hydra/launcher")),
        launcher if in_sweep else None,
        list(config.hydra.overrides.hydra),
        in_sweep=in_sweep,
    )
    if in_sweep and not follows:
        job.refusal = job.refusal or refusal(job.folder)
        if job.refusal is None:  # else what a live job has there is left alone
            _enter_sweep(job, config)


def is_skipped() -> bool:
    """Return whether node 0 does not run this process's job in this launch of the sweep."""
    record = _current and read_record(_current.folder)
    if not record or record.sweep != os.environ.get(SWEEP_VARIABLE):
        return False
    return record.reused or record.status in (NOT_STARTED, REFUSED)


def identity(config: DictConfig) -> JobRecord:
    """Return the record of a sweep's job that is about to start."""
    return JobRecord(
        sweep=os.environ.get(SWEEP_VARIABLE, ""),
        number=OmegaConf.select(config, "hydra.job.num", throw_on_missing=False),
        overrides=tuple(map(str, config.hydra.overrides.task)),
    )


def plan(config: DictConfig, folder: Path) -> tuple[Entry, JobRecord]:
    """Return what to do with a job, and the record that it then starts with (or keeps)."""
    own = identity(config)
    earlier = read_record(folder)
    summary = read_summary(folder)
    completed = earlier is not None and COMPLETED in (earlier.status, summary and summary.status)
    entry = decide(
        earlier,
        completed=completed,
        overrides=own.overrides,
        sweep=own.sweep,
        resume=early_settings(config).sweep_resume,
    )
    if entry is not Entry.REUSE or earlier is None:
        return entry, own
    objective = earlier.objective if summary is None else summary.objective
    return entry, replace(own, status=COMPLETED, exit_code=0, objective=objective, reused=True)


def reuse(record: JobRecord, folder: Path) -> None:
    """Take a completed job into this launch of the sweep."""
    _write(record, folder)
    log.info(
        "job %s completed in an earlier launch of this sweep and is not run again "
        "(sweep_resume=true)",
        record.number,
    )


def _enter_sweep(job: CurrentJob, config: DictConfig) -> None:
    entry, job.record = plan(config, job.folder)
    if entry is Entry.REUSE:
        job.runs = False
        reuse(job.record, job.folder)
        return
    try:
        if entry is Entry.RUN_ANEW and (earlier := set_aside(job.folder, OF_HYDRA)) is not None:
            log.info("what an earlier job left in this run folder is now in %s", earlier)
        # else a job that dies early would seem to have ended as the one before it
        (job.folder / "summary.json").unlink(missing_ok=True)
    except OSError as error:
        # not run over it: a checkpoint of another job must not be mistaken for this one's
        job.refusal = f"{job.folder}: cannot move aside what it holds: {error.strerror}"
        return
    reason = _why_not_started(config, job.record)
    if reason is None:
        _write(job.record, job.folder)
    else:
        job.runs = False
        job.ended(NOT_STARTED, 0, reason=reason)
        log.info("job %s is not started: %s", job.record.number, reason)


def _why_not_started(config: DictConfig, record: JobRecord) -> str | None:
    folder = sweep_folder()
    assert folder is not None
    if early_settings(config).sweep_fail_fast and has_failed(folder, record.sweep):
        return "another job failed before (sweep_fail_fast=true)"
    return "the sweep was stopped" if sweep_stop_requested(folder) else None


def _write(record: JobRecord, folder: Path) -> None:
    try:
        record.write(folder)
    except OSError as error:
        log.warning("cannot write %s: %s", folder / "sweep_job.json", error.strerror)


def job_ended(
    status: str, exit_code: int, *, reason: str | None = None, objective: Any = None
) -> None:
    """Record the end of this process's job, where it is one of a sweep."""
    if _current is not None:
        _current.ended(status, exit_code, reason=reason, objective=objective)
