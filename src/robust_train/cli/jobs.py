"""The task functions that Hydra calls: one job under the launcher, or one plain run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from robust_train.config.attempt import plain_config
from robust_train.errors import (
    EXIT_FAILED,
    EXIT_NO_DEVICE,
    AttemptsExhausted,
    ConfigError,
    JobInterrupted,
    NoDevice,
    TrainerFailed,
    UserError,
)
from robust_train.execution.library_imports import libraries_of
from robust_train.execution.trainer_ref import TrainerRef
from robust_train.launcher import Job
from robust_train.nodes import follow
from robust_train.runfolder.requests import sweep_stop_requested
from robust_train.runfolder.summary import Summary
from robust_train.settings import data_folder, sweep_folder, target_of
from robust_train.sweep import current
from robust_train.sweep.job_record import INTERRUPTED, REFUSED
from robust_train.sweep.plugins_of_others import no_objective
from robust_train.values import MEMORY_FAILURES, FailureKind


class Ending:
    """How this process ends.

    Attributes:
        code: exit code: that of the first job that did not complete, else 0.
    """

    def __init__(self) -> None:
        self.code = 0
        self._refusals: set[str] = set()

    def refuse(self, error: ConfigError) -> None:
        """Print why a job was refused; jobs of a sweep that share the mistake print it once."""
        message = str(error)
        if message not in self._refusals:
            self._refusals.add(message)
            print(message, file=sys.stderr)
        self.note(error.exit_code)

    def note(self, code: int) -> None:
        """Take one job's exit code into account."""
        self.code = self.code or code


ending = Ending()


def robust_job(cfg: DictConfig) -> Any:
    """Run one job under the launcher; return the objective, NaN for a failed job of a sweep."""
    return _job(cfg, remedies=True)


def plain_job(cfg: DictConfig) -> Any:
    """Run one attempt of the trainer in this process, on the device that the config names."""
    return _job(plain_config(cfg), remedies=False)


def check(cfg: DictConfig) -> None:
    """Refuse what can be seen without an attempt: a wrong trainer, data that are not there. Raises
    ConfigError: with one line."""
    try:
        target, root = target_of(cfg), data_folder(cfg)
    except (ConfigError, OmegaConfBaseException):  # reported by the job, for any command
        return
    libraries_of(TrainerRef(target))
    if root and not os.path.isdir(os.path.expanduser(root)):
        raise ConfigError(f"dataset.root={root}: there is no such folder")


def _job(cfg: DictConfig, *, remedies: bool) -> Any:
    """Run a job, alone or as one of a sweep, which goes on without it if it does not complete."""
    job = current.current_job()
    if job is not None and not job.runs:
        return job.objective
    try:
        if job is not None and job.refusal is not None:
            raise ConfigError(job.refusal)
        led = follow(None, cfg, is_over=current.is_skipped)
        summary = led or Job(None, cfg, remedies=remedies, explain=print_failure).run()
        if summary.status == "completed":
            return summary.objective
        code = exit_code_of(summary)
        ending.note(code)
        current.job_ended(summary.status, code, reason=summary.reason)
    except ConfigError as error:
        # printed here, because Hydra puts lines of its own around what a job raises
        ending.refuse(error)
        current.job_ended(REFUSED, error.exit_code, reason=str(error))
    except TrainerFailed as error:  # on another node
        print(error, file=sys.stderr)
        ending.note(EXIT_FAILED)
    except JobInterrupted as error:
        current.job_ended(INTERRUPTED, error.exit_code, reason=str(error) or "interrupted")
        folder = sweep_folder()
        if folder is None or not sweep_stop_requested(folder):
            raise
        # the sweep goes on to its next jobs, none of which is started any more
        ending.note(error.exit_code)
    hydra = HydraConfig.get()
    return no_objective(hydra) if hydra.mode == RunMode.MULTIRUN else None


@contextlib.contextmanager
def refused_in_one_line() -> Iterator[None]:
    """Print what ``launch`` raises here: Hydra would put lines of its own around it.

    In a sweep it is raised, so that the job counts as failed.
    """
    try:
        yield
    except Exception as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise
        code = exit_code_of_error(error)
        if code is None:
            raise
        ending.note(code)


def exit_code_of_error(error: BaseException) -> int | None:
    """Return the exit code for what ``launch`` raised in a project's ``main``, after its reason.

    None: it is none of ours.
    """
    if isinstance(error, JobInterrupted):
        return error.exit_code
    # its own traceback, without the launcher's frames
    shown = error.__cause__ if isinstance(error.__cause__, TrainerFailed) else error
    if not isinstance(shown, ConfigError | NoDevice | AttemptsExhausted | TrainerFailed):
        return None
    print(f"{error if isinstance(error, UserError) else shown}".rstrip(), file=sys.stderr)
    if isinstance(shown, ConfigError):
        return shown.exit_code
    return EXIT_NO_DEVICE if isinstance(shown, NoDevice) else EXIT_FAILED


def exit_code_of(summary: Summary) -> int:
    """Return the exit code of a job that was not interrupted."""
    codes = {"completed": 0, "no_device": EXIT_NO_DEVICE}
    return codes.get(summary.status, EXIT_FAILED)


def print_failure(summary: Summary) -> None:
    """Print why a job failed.

    The trainer's traceback where it explains more than a sentence; else, or also, the reason.
    """
    is_refusal = summary.status == "failed" and not summary.attempts
    if is_refusal or summary.status not in ("failed", "no_device"):
        return
    outcome = summary.attempts[-1].attempt.outcome if summary.attempts else None
    kind = None if outcome is None or outcome.failure is None else outcome.failure.kind
    traceback = None if outcome is None or kind in MEMORY_FAILURES else outcome.traceback
    if traceback is not None:
        print(traceback, file=sys.stderr, end="")
    if traceback is None or kind is not FailureKind.BUG:
        print(f"{summary.status}: {summary.reason}", file=sys.stderr)
