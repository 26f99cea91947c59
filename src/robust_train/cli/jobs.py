"""The task functions that Hydra calls: one job under the launcher, or one plain run."""

from __future__ import annotations

import logging
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
    Interrupted,
    JobInterrupted,
    UserError,
)
from robust_train.events import AttemptStarted
from robust_train.execution.child import plain, trainer_traceback
from robust_train.execution.request import TrainerRef, call_trainer
from robust_train.execution.signals import SignalWatch
from robust_train.failures import classify_failure
from robust_train.launcher import Job
from robust_train.memory.stability import attempt_stability
from robust_train.queue.devices import job_name
from robust_train.run import Run
from robust_train.runfolder.attempt_requests import AttemptRequests
from robust_train.runfolder.folder import RunFolder
from robust_train.runfolder.requests import sweep_stop_requested
from robust_train.runfolder.summary import Summary, objective_of
from robust_train.settings import sweep_folder, target_of
from robust_train.sweep.current import (
    CurrentJob,
    current_job,
    job_ended,
    job_interrupted,
    job_refused,
)
from robust_train.sweep.plugins_of_others import no_objective
from robust_train.values import MEMORY_FAILURES, FailureKind

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
        job_interrupted(error, error.exit_code)
        if _is_sweep_stopped():
            ending.note(error.exit_code)
            return _no_objective()
        raise
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


def _is_sweep_stopped() -> bool:
    """Whether the sweep goes on to its next jobs, none of which is started any more."""
    folder = sweep_folder()
    return folder is not None and sweep_stop_requested(folder)


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
    signals = SignalWatch()
    run_dir = Path(HydraConfig.get().runtime.output_dir)

    def stop(signum: int) -> None:
        run.request_stop()
        if not run.is_cooperative:
            raise Interrupted("interrupted")

    try:
        _check_place(current_job())
        folder = RunFolder(run_dir, job_name(cfg, run_dir), signals, sweep_folder())
    except ConfigError as error:
        return _refused(error)
    run = Run(run_dir=run_dir, report=folder.on_event, can_restart=False)
    requests = AttemptRequests(run, run_dir, folder.tick)
    try:
        with folder:
            if settle_batch_size(cfg):
                effective = cfg.training.batch_size
                run.batch_search = BatchSearch(effective, memory_share=cfg.memory.fraction)
            validate(cfg)
            _, trainer = TrainerRef(target_of(cfg)).load()
            cfg.device = _torch_device(str(cfg.device))
            training = cfg.training
            folder.attempt_starts(
                1,
                AttemptStarted(
                    cfg.device, training.batch_size, training.gradient_accumulation_steps
                ),
            )
            with signals, signals.handed_to(stop), requests:
                result = call_trainer(trainer, cfg, run)
                signals.raise_if_received()
            folder.ended("completed", None)
        _end_memory(run, None)
    except ConfigError as error:
        return _refused(error)
    except KeyboardInterrupt as error:
        code = 130 if signals.received is None else JobInterrupted(signals.received).exit_code
        job_interrupted(error, code)
        if _is_sweep_stopped():
            ending.note(code)
            return _no_objective()
        signals.raise_if_received()
        raise
    except UserError as error:
        print(f"failed: {error}", file=sys.stderr)
        ending.note(EXIT_FAILED)
        job_ended("failed", EXIT_FAILED, reason=str(error))
        return _no_objective()
    except Exception as error:
        print(trainer_traceback(error), file=sys.stderr, end="")
        if classify_failure(error).kind in MEMORY_FAILURES:
            print("train_robust.py would go on with a smaller batch", file=sys.stderr)
        ending.note(EXIT_FAILED)
        job_ended("failed", EXIT_FAILED, reason=classify_failure(error).message)
        _end_memory(run, error)
        return _no_objective()
    log.info("completed; run folder: %s", run.run_dir)
    return plain(objective_of(result))


def _end_memory(run: Run, error: Exception | None) -> None:
    if run.memory_keeper is not None:
        run.memory_keeper.clean_up(error)
    attempt_stability(run.run_dir, run.attempt)


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
