"""The task functions that Hydra calls: one job under the launcher, or one plain run."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from robust_train.batch.search import BatchSearch
from robust_train.config.batch import settle_batch_size
from robust_train.config.schema import validate
from robust_train.errors import (
    EXIT_BAD_CONFIG,
    EXIT_FAILED,
    EXIT_NO_DEVICE,
    ConfigError,
    JobInterrupted,
)
from robust_train.events import AttemptStarted
from robust_train.execution.inline import InlineExecutor
from robust_train.execution.request import AttemptRequest
from robust_train.execution.runner import plain
from robust_train.execution.signals import SignalWatch
from robust_train.execution.trainer_ref import TrainerRef
from robust_train.launcher import Job
from robust_train.memory.stability import attempt_stability
from robust_train.runfolder.folder import RunFolder
from robust_train.runfolder.requests import sweep_stop_requested
from robust_train.runfolder.summary import Summary, objective_of
from robust_train.settings import job_name, sweep_folder, target_of
from robust_train.sweep.current import (
    CurrentJob,
    current_job,
    job_ended,
    job_interrupted,
    job_refused,
)
from robust_train.sweep.plugins_of_others import no_objective
from robust_train.values import MEMORY_FAILURES, FailureKind, Outcome

log = logging.getLogger("robust_train")


class Ending:
    """How this process ends.

    Attributes:
        code: exit code: that of the first job that did not complete, else 0.
        started: a job was entered; what is raised from then on is not Hydra's doing.
    """

    def __init__(self) -> None:
        self.code = 0
        self.started = False
        self._said: set[str] = set()

    def refuse(self, message: str) -> None:
        """Say why a job was refused; jobs of a sweep that share the mistake say it once."""
        if message not in self._said:
            self._said.add(message)
            print(message, file=sys.stderr)
        self.note(EXIT_BAD_CONFIG)

    def note(self, code: int) -> None:
        """Take one job's exit code into account."""
        self.code = self.code or code


ending = Ending()


def robust_job(cfg: DictConfig) -> Any:
    """One job under the launcher; returns the objective, NaN for a failed job of a sweep."""
    ending.started = True
    job = current_job()
    if job is not None and not job.runs:
        return job.objective
    try:
        _check_place(job)
        summary = Job(None, cfg).run()
    except ConfigError as error:
        return _refused(error)
    except JobInterrupted as error:
        return _interrupted(error)
    if summary.status == "completed":
        return summary.objective
    say_why(summary)
    code = EXIT_NO_DEVICE if summary.status == "no_device" else EXIT_FAILED
    ending.note(code)
    job_ended(summary.status, code, reason=summary.reason)
    return _no_objective()


def _check_place(job: CurrentJob | None) -> None:
    if job is not None and job.refusal is not None:
        raise ConfigError(job.refusal)


def _refused(error: ConfigError) -> float | None:
    # said here, because Hydra puts lines of its own around what a job raises
    ending.refuse(str(error))
    job_refused(str(error))
    return _no_objective()


def _interrupted(error: JobInterrupted) -> float | None:
    job_interrupted(error, error.exit_code)
    folder = sweep_folder()
    if folder is None or not sweep_stop_requested(folder):
        raise error
    # the sweep goes on to its next jobs, none of which is started any more
    ending.note(error.exit_code)
    return _no_objective()


def _no_objective() -> float | None:
    """What lets a sweep go on to its next job."""
    hydra = HydraConfig.get()
    return no_objective(hydra) if hydra.mode == RunMode.MULTIRUN else None


def say_why(summary: Summary) -> None:
    """The trainer's traceback where it explains more than a sentence; else, or also, the reason."""
    outcome = summary.attempts[-1].attempt.outcome if summary.attempts else None
    kind = None if outcome is None or outcome.failure is None else outcome.failure.kind
    traceback = None if outcome is None or kind in MEMORY_FAILURES else outcome.traceback
    if traceback is not None:
        print(traceback, file=sys.stderr, end="")
    if traceback is None or kind is not FailureKind.BUG:
        print(f"{summary.status}: {summary.reason}", file=sys.stderr)


def plain_job(cfg: DictConfig) -> Any:
    """One plain run of the trainer in this process."""
    ending.started = True
    try:
        _check_place(current_job())
        request = _plain_request(cfg)
        outcome = _run_plainly(request)
    except ConfigError as error:
        return _refused(error)
    except JobInterrupted as error:
        return _interrupted(error)
    attempt_stability(request.run_dir, request.attempt)
    if outcome.failure is None:
        log.info("completed; run folder: %s", request.run_dir)
        return plain(objective_of(outcome.result))
    failure = outcome.failure
    print(outcome.traceback or f"failed: {failure.message}\n", file=sys.stderr, end="")
    if failure.kind in MEMORY_FAILURES:
        print("train_robust.py would go on with a smaller batch", file=sys.stderr)
    ending.note(EXIT_FAILED)
    job_ended("failed", EXIT_FAILED, reason=failure.message)
    return _no_objective()


def _plain_request(cfg: DictConfig) -> AttemptRequest:
    search = None
    if settle_batch_size(cfg):
        search = BatchSearch(cfg.training.batch_size, memory_share=cfg.memory.fraction)
    validate(cfg)
    cfg.device = _torch_device(str(cfg.device))
    return AttemptRequest(
        trainer=TrainerRef(target_of(cfg)),
        cfg=cfg,
        hydra_cfg=None,
        attempt=1,
        run_dir=Path(HydraConfig.get().runtime.output_dir),
        resume_checkpoint=None,
        environ=dict(os.environ),
        cwd=os.getcwd(),
        batch_search=search,
    )


def _run_plainly(request: AttemptRequest) -> Outcome:
    cfg, run_dir = request.cfg, request.run_dir
    signals = SignalWatch()
    folder = RunFolder(run_dir, job_name(cfg, run_dir), signals, sweep_folder())
    executor = InlineExecutor(request.trainer.load, signals, can_restart=False)
    executor.prepare()
    training = cfg.training
    given = AttemptStarted(cfg.device, training.batch_size, training.gradient_accumulation_steps)
    with folder, signals:
        folder.attempt_starts(1, given)
        outcome = executor.run(request, folder.on_event, hold=folder.hold, tick=folder.tick)
        signals.raise_if_received()
        status = "completed" if outcome.failure is None else "failed"
        folder.ended(status, None if outcome.failure is None else outcome.failure.message)
    return outcome


def _torch_device(device: str) -> str:
    """The device for this process: ``auto`` resolved, an absent one refused."""
    import torch

    count = torch.cuda.device_count()
    if device == "auto":
        return "cuda:0" if count else "cpu"
    if device.startswith("cuda"):
        ordinal = int(device.partition(":")[2] or 0)
        if ordinal >= count:
            raise ConfigError(f"device={device}: no such GPU here; torch sees {count}")
        return f"cuda:{ordinal}"
    if device != "cpu":
        raise ConfigError(
            f"device={device}: accepted by train.py are auto, cpu, cuda, cuda:<number>"
        )
    return device
