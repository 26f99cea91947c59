"""Prepares the run folder of a sweep's job before the job starts.

`GpuQueue` calls `prepare_job` in the sweep's process. With other launchers, `SweepCallback` calls
it in the job's process.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from robust_train.config.checks import unchecked
from robust_train.config.schema import RobustConfig
from robust_train.files import set_aside
from robust_train.folder.hydra_state import OF_HYDRA, composed_files
from robust_train.folder.lock import refusal
from robust_train.folder.provenance import changed_files, config_digests, read_environment
from robust_train.folder.requests import RefusedError, request_sweep_stop, sweep_stop_requested
from robust_train.sweep.live_sweep import LOST
from robust_train.sweep.record import (
    Status,
    SweepJob,
    is_taken_over,
    link_outside,
    read_row,
    start_record,
)

log = logging.getLogger("robust_train")

SWEEP_VARIABLE = "ROBUST_TRAIN_SWEEP"
"""The environment variable with the id of the sweep's launch, for the jobs' processes."""


def sweep_folder_of(config: DictConfig) -> Path:
    """Return the sweep's folder.

    A relative folder starts where the user started the sweep. Hydra may have changed the working
    directory since.
    """
    return Path(str(config.hydra.runtime.cwd)) / str(config.hydra.sweep.dir)


def repeat_of(config: DictConfig) -> int:
    """Return how many jobs each combination of values has. It is 1 with other sweepers."""
    return int(config.hydra.sweeper.get("repeat") or 1)


def prepare_job(config: DictConfig, folder: Path) -> SweepJob:
    """Prepare the run folder of a job that is about to start, and write its record.

    Returns:
        The job. If it must not run, it has ended already: it was refused, completed in an earlier
        launch, or the sweep was stopped.
    """
    sweep_folder = sweep_folder_of(config)
    job = SweepJob(
        config.hydra.job.num,
        tuple(str(override) for override in config.hydra.overrides.task),
        os.environ.get(SWEEP_VARIABLE, ""),
        folder=str(folder),
        trial=config.hydra.job.num // repeat_of(config),
    )
    if is_taken_over(sweep_folder, job.sweep):
        return job.as_refused(LOST % sweep_folder)
    problem = refusal(folder)
    if problem is not None:
        # A live job holds the folder, so its content must stay.
        return job.as_refused(problem)
    job, continues = start_record(job, read_row(folder), resume=unchecked(config).resume)
    if not job.is_running:
        _log_reuse(job, config, folder)
    else:
        try:
            _clear_folder(folder, continues=continues)
        except OSError as error:
            # A checkpoint of an earlier job must not be mistaken for this job's.
            return job.as_refused(f"{folder}: cannot move aside what it holds: {error.strerror}")
        if sweep_stop_requested(sweep_folder):
            reason = "the sweep was stopped"
            job = replace(job, status=Status.NOT_STARTED, reason=reason)
            log.info("job %d is not started: %s", job.job, reason)
    job.write(folder)
    link_outside(folder, job.job, sweep_folder)
    return job


def _log_reuse(job: SweepJob, config: DictConfig, folder: Path) -> None:
    """Log that a job is over since an earlier launch. A changed config makes it a warning."""
    digests = config_digests(composed_files(config))
    changed = ", ".join(changed_files(read_environment(folder), digests))
    level = logging.INFO
    ending = ""
    if changed:
        level = logging.WARNING
        ending = f"; its config has changed since: {changed}"
    log.log(
        level,
        "job %s %s in an earlier launch of this sweep and is not run again (resume=true)%s",
        job.job,
        job.status,
        ending,
    )


def _clear_folder(folder: Path, *, continues: bool) -> None:
    """Move the files of an earlier job aside, unless this job ``continues`` it.

    Raises:
        OSError: the files cannot be moved.
    """
    if folder.exists() and not continues:
        moved_to = set_aside(folder, OF_HYDRA)
        if moved_to:
            log.info("what an earlier job left here is now in %s", moved_to)
    # With an old summary, a job that dies early would seem to have ended like the earlier job.
    (folder / "summary.json").unlink(missing_ok=True)


def fail_fast(settings: RobustConfig, job: SweepJob, folder: Path) -> None:
    """Stop the sweep in ``folder`` if a job has failed and ``sweep_fail_fast`` is set."""
    if settings.sweep_fail_fast and job.exit_code:
        with contextlib.suppress(OSError, RefusedError):
            request_sweep_stop(folder)
            log.info("job %d has ended the sweep: sweep_fail_fast=true", job.job)
