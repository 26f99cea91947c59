"""A job that Hydra has entered: whether it runs, and how it ended."""

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

from robust_train.config.checks import unchecked
from robust_train.files import set_aside
from robust_train.folder.lock import refusal
from robust_train.folder.requests import sweep_stop_requested
from robust_train.folder.state import read_summary
from robust_train.launcher.hydra_state import sweep_folder
from robust_train.sweep.job_record import (
    COMPLETED,
    NOT_STARTED,
    STARTED,
    JobStart,
    SweepJob,
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
    """A job that Hydra has entered.

    Attributes:
        folder: its run folder.
        record: its record; None if it is not one of a sweep.
        runs: whether it is to be run; otherwise its objective is known.
        refusal: why it must not be run.
    """

    folder: Path
    record: SweepJob | None = None
    runs: bool = True
    refusal: str | None = None

    @property
    def objective(self) -> Any:
        """The sweeper's value of a job that is not run."""
        if self.record is not None and self.record.reused:
            return self.record.result
        return no_objective(HydraConfig.get())

    def ended(
        self,
        status: str,
        exit_code: int,
        *,
        reason: str | None = None,
        result: Any = None,
    ) -> None:
        """Record the job's end. The first call counts."""
        if self.record is not None and self.record.status == STARTED:
            self.record = replace(
                self.record,
                status=status,
                exit_code=exit_code,
                reason=reason,
                result=result,
            )
            _write(self.record, self.folder)


def enter(config: DictConfig, launcher: str | None) -> CurrentJob:
    """Decide whether a job that Hydra enters runs, and prepare its folder."""
    in_sweep = config.hydra.mode == RunMode.MULTIRUN
    job = CurrentJob(Path(str(config.hydra.runtime.output_dir)))
    job.refusal = misplaced_launcher(
        str(config.hydra.runtime.choices.get("hydra/launcher")),
        launcher if in_sweep else None,
        list(config.hydra.overrides.hydra),
        in_sweep=in_sweep,
    )
    if in_sweep:
        job.refusal = job.refusal or refusal(job.folder)
        if job.refusal is None:  # otherwise what a live job has there is left alone
            _enter_sweep(job, config)
    return job


def identity(config: DictConfig) -> SweepJob:
    """Return the record of a sweep's job that is about to start."""
    return SweepJob(
        sweep=os.environ.get(SWEEP_VARIABLE, ""),
        job=OmegaConf.select(config, "hydra.job.num", throw_on_missing=False),
        overrides=tuple(map(str, config.hydra.overrides.task)),
    )


def plan(config: DictConfig, folder: Path) -> tuple[JobStart, SweepJob]:
    """Return what to do with a job, and the record that it then starts with (or keeps)."""
    own = identity(config)
    earlier = read_record(folder)
    summary = read_summary(folder)
    completed = earlier is not None and COMPLETED in (
        earlier.status,
        summary and summary.status,
    )
    entry = decide(
        earlier,
        completed=completed,
        overrides=own.overrides,
        sweep=own.sweep,
        resume=unchecked(config).sweep_resume,
    )
    if entry is not JobStart.REUSE or earlier is None:
        return entry, own
    result = earlier.result if summary is None else summary.objective
    return entry, replace(
        own, status=COMPLETED, exit_code=0, result=result, reused=True
    )


def reuse(record: SweepJob, folder: Path) -> None:
    """Take a completed job into this launch of the sweep."""
    _write(record, folder)
    log.info(
        "job %s completed in an earlier launch of this sweep and is not run again "
        "(sweep_resume=true)",
        record.job,
    )


def _enter_sweep(job: CurrentJob, config: DictConfig) -> None:
    entry, job.record = plan(config, job.folder)
    if entry is JobStart.REUSE:
        job.runs = False
        reuse(job.record, job.folder)
        return
    try:
        if (
            entry is JobStart.RUN_ANEW
            and (earlier := set_aside(job.folder, OF_HYDRA)) is not None
        ):
            log.info(
                "what an earlier job left in this run folder is now in %s", earlier
            )
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
        log.info("job %s is not started: %s", job.record.job, reason)


def _why_not_started(config: DictConfig, record: SweepJob) -> str | None:
    folder = sweep_folder()
    assert folder is not None
    if unchecked(config).sweep_fail_fast and has_failed(folder, record.sweep):
        return "another job failed before (sweep_fail_fast=true)"
    return "the sweep was stopped" if sweep_stop_requested(folder) else None


def _write(record: SweepJob, folder: Path) -> None:
    try:
        record.write(folder)
    except OSError as error:
        log.warning("cannot write %s: %s", folder / "sweep_job.json", error.strerror)
