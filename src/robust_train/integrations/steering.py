"""Connects a framework's trainer to the launcher: effective batch size, progress, and results.

The integrations of Lightning, transformers and accelerate share these functions. They run in the
attempt's process, on every rank. The integrations also share `step_recovery`, which repeats a step
in smaller parts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from robust_train.attempt.run import Run, live_of
from robust_train.config.checks import unchecked
from robust_train.config.trainers import require
from robust_train.config.training_plans import SavePlan
from robust_train.model.errors import UserError
from robust_train.model.events import BatchKept


def framework(module: str) -> Any:
    """Import a framework's module, with a clear error if the framework is not installed."""
    name = module.partition(".")[0]
    return require(module, f"robust_train.integrations.{name}", extra=name)


def lightning(module: str = "") -> Any:
    """Import a module of Lightning, under the one of its two names that the program uses."""
    name = "lightning.pytorch"
    if name not in sys.modules and "pytorch_lightning" in sys.modules:
        name = "pytorch_lightning"
    return framework(f"{name}{module}")


def effective_batch_size(cfg: DictConfig) -> int:
    """Return the number of samples in an optimizer step, on all ranks together."""
    ranks = OmegaConf.select(cfg, "num_gpus") or 1
    return int(cfg.training.batch_size * cfg.training.gradient_accumulation_steps * ranks)


def count_machines() -> int:
    """Return the number of machines on which the ranks run, which torchrun exports."""
    return int(os.environ.get("GROUP_WORLD_SIZE", 1))


def refuse_saving_on_each_node(owner: str, options: Any) -> None:
    """Raise UserError if every machine would write the same files into the shared run folder."""
    if getattr(options, "save_on_each_node", False) and count_machines() > 1:
        raise UserError(
            f"{owner}: save_on_each_node=True: all machines would write the same files into the "
            "run folder, which they share; leave it out"
        )


def keep_batch(run: Run, reason: str) -> None:
    """Forbid all attempts to split the batch in another way, because that would change training."""
    live_of(run).parts.keep_batch(reason)
    if run.is_main:
        live_of(run).reports.send(BatchKept(reason))


class Steps:
    """Reports optimizer steps to the launcher, and sends each loss once.

    Raises:
        UserError: the job already had a fit or a loop that was connected to the launcher.
    """

    def __init__(self, cfg: DictConfig, run: Run) -> None:
        if live_of(run).is_steered:
            raise UserError(
                "a second fit or loop in one job, which the next attempt would start from the "
                "checkpoint of the first: make each a job of its own (-m fold=0,1,2), or leave the "
                "other to the framework (trainer.fit, trainer.train)"
            )
        live_of(run).steer(SavePlan.of(unchecked(cfg)))
        self._run = run
        self._every = max(cfg.training.log_every_steps, 1)
        self._loss: dict[str, float] = {}  # the loss to send with the next report

    def set_loss(self, loss: float) -> None:
        """Send ``loss`` with the next report that the launcher receives."""
        self._loss = {"loss": loss}

    def report(self, step: int, total_steps: int | None, loss: Any = None) -> None:
        """Report that optimizer step ``step`` is done, with its loss every ``log_every_steps``."""
        if loss is not None:
            live_of(self._run).losses.take(step, loss)
            if step % self._every == 0:
                # Reading the value waits for the GPU, so it is not done in every step.
                self._loss = {"loss": float(loss)}
        is_first = self._run.last_step is None
        was_sent = self._run.progress(step, total_steps=total_steps, **self._loss)
        if was_sent:
            self._loss = {}
        if is_first:
            live_of(self._run).reports.record_memory("first step done")


def result_of(metric: str | None, logged: Mapping[str, float]) -> Any:
    """Return the logged value of ``metric``, or all logged values if ``metric`` is None.

    Raises:
        UserError: ``metric`` was not logged.
    """
    if metric is None:
        return dict(logged)
    if metric not in logged:
        names = ", ".join(sorted(logged)) or "none"
        raise UserError(f"metric={metric}: was not logged; there are {names}")
    return logged[metric]
