"""The task functions that Hydra calls: one job under the launcher, or one plain run."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
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
from robust_train.queue.devices import job_name
from robust_train.runfolder.folder import RunFolder
from robust_train.runfolder.requests import sweep_stop_requested
from robust_train.runfolder.summary import Summary, objective_of
from robust_train.settings import sweep_folder, target_of
from robust_train.sweep import current
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
        self._refusals: set[str] = set()

    def refuse(self, message: str) -> None:
        """Print why a job was refused; jobs of a sweep that share the mistake print it once."""
        if message not in self._refusals:
            self._refusals.add(message)
            print(message, file=sys.stderr)
        self.note(EXIT_BAD_CONFIG)

    def note(self, code: int) -> None:
        """Take one job's exit code into account."""
        self.code = self.code or code


ending = Ending()


def robust_job(cfg: DictConfig) -> Any:
    """Run one job under the launcher; return the objective, NaN for a failed job of a sweep."""
    job = current.current_job()
    if job is not None and not job.runs:
        ending.started = True
        return job.objective

    def run() -> Any:
        summary = Job(None, cfg).run()
        code = exit_code_of(summary)
        if code == 0:
            return summary.objective
        ending.note(code)
        current.job_ended(summary.status, code, reason=summary.reason)
        return _no_objective()

    return _in_its_place(run)


def plain_job(cfg: DictConfig) -> Any:
    """Run the trainer once in this process, without supervision; return the objective."""

    def run() -> Any:
        request = _plain_request(cfg)
        outcome = _run_plainly(request)
        attempt_stability(request.run_dir, request.attempt)
        failure = outcome.failure
        if failure is None:
            log.info("completed; run folder: %s", request.run_dir)
            return plain(objective_of(outcome.result))
        print(outcome.traceback or f"failed: {failure.message}\n", file=sys.stderr, end="")
        if failure.kind in MEMORY_FAILURES:
            print("train_robust.py would go on with a smaller batch", file=sys.stderr)
        ending.note(EXIT_FAILED)
        current.job_ended("failed", EXIT_FAILED, reason=failure.message)
        return _no_objective()

    return _in_its_place(run)


def exit_code_of(summary: Summary) -> int:
    """Return the exit code of a job that was not interrupted; print why it failed.

    The trainer's traceback where it explains more than a sentence; else, or also, the reason.
    """
    if summary.status == "completed":
        return 0
    outcome = summary.attempts[-1].attempt.outcome if summary.attempts else None
    kind = None if outcome is None or outcome.failure is None else outcome.failure.kind
    traceback = None if outcome is None or kind in MEMORY_FAILURES else outcome.traceback
    if traceback is not None:
        print(traceback, file=sys.stderr, end="")
    if traceback is None or kind is not FailureKind.BUG:
        print(f"{summary.status}: {summary.reason}", file=sys.stderr)
    return EXIT_NO_DEVICE if summary.status == "no_device" else EXIT_FAILED


def _in_its_place(run: Callable[[], Any]) -> Any:
    """Run a job, alone or as one of a sweep, which goes on without it if it is refused."""
    ending.started = True
    job = current.current_job()
    try:
        if job is not None and job.refusal is not None:
            raise ConfigError(job.refusal)
        return run()
    except ConfigError as error:
        # printed here, because Hydra puts lines of its own around what a job raises
        ending.refuse(str(error))
        current.job_refused(str(error))
    except JobInterrupted as error:
        current.job_interrupted(error, error.exit_code)
        folder = sweep_folder()
        if folder is None or not sweep_stop_requested(folder):
            raise
        # the sweep goes on to its next jobs, none of which is started any more
        ending.note(error.exit_code)
    return _no_objective()


def _no_objective() -> float | None:
    """Return what lets a sweep go on to its next job."""
    hydra = HydraConfig.get()
    return no_objective(hydra) if hydra.mode == RunMode.MULTIRUN else None


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
    """Return the device for this process: ``auto`` resolved, an absent one refused."""
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
