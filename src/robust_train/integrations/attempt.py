"""What the integrations share: the effective batch, the steps that are sent, the job's result."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from robust_train.attempt.run import Run
from robust_train.config.checks import unchecked
from robust_train.config.placeholders import SavePlan
from robust_train.model.errors import UserError
from robust_train.model.events import BatchKept


def effective_batch_size(cfg: DictConfig) -> int:
    """Return the samples in an optimizer step, however they are split."""
    ranks = OmegaConf.select(cfg, "num_gpus") or 1
    return int(
        cfg.training.batch_size * cfg.training.gradient_accumulation_steps * ranks
    )


def machines() -> int:
    """Return how many machines the ranks are on, as torchrun counts them."""
    return int(os.environ.get("GROUP_WORLD_SIZE", 1))


def refuse_saving_on_each_node(owner: str, options: Any) -> None:
    """Raise UserError if every machine would write the same files: all see the run folder."""
    if getattr(options, "save_on_each_node", False) and machines() > 1:
        raise UserError(
            f"{owner}: save_on_each_node=True: all machines would write the same files into the "
            "run folder, which they share; leave it out"
        )


def keep_batch(run: Run, reason: str) -> None:
    """Let no attempt split the batch in another way, which would change the training."""
    run.keeps_batch = reason
    if run.is_main:
        run.report(BatchKept(reason))


class Steps:
    """Sends optimizer steps to the launcher: each loss once, memory after the first step."""

    def __init__(self, cfg: DictConfig, run: Run) -> None:
        run.saving.plan = SavePlan.of(unchecked(cfg))
        self._run = run
        self._loss: dict[str, float] = {}

    def log_loss(self, loss: float) -> None:
        """Send ``loss`` with the next step that is passed on."""
        self._loss = {"loss": loss}

    def done(self, step: int, total_steps: int | None) -> None:
        """Send that optimizer step ``step`` is done."""
        is_first = self._run.last_step is None
        if self._run.progress(step, total_steps=total_steps, **self._loss):
            self._loss = {}
        if is_first:
            self._run.record_memory("first step done")


def result_of(metric: str | None, logged: Mapping[str, float]) -> Any:
    """Return ``metric`` from what was logged last, or all of that if it is None.

    Raises:
        UserError: it was not logged.
    """
    if metric is None:
        return dict(logged)
    if metric not in logged:
        names = ", ".join(sorted(logged)) or "none"
        raise UserError(f"metric={metric}: was not logged; there are {names}")
    return logged[metric]
