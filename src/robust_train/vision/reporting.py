"""Report a run's progress: screen, curves, launcher."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from omegaconf import DictConfig
from torch import Tensor

from robust_train.attempt.run import Run
from robust_train.model.errors import ConfigError
from robust_train.readable import first_line
from robust_train.vision.curves import Curves, open_curves
from robust_train.vision.step import Score
from robust_train.vision.training_state import LossAverage, ResumePosition

log = logging.getLogger("robust_train.vision")

_READING_INTERVAL_SECONDS = 1.0


class TrainingDivergedError(RuntimeError):
    """The loss is no longer finite; training on would only spoil the checkpoints."""


def checked_loss(average: LossAverage, step: int) -> float:
    """Return the average's value."""
    value = average.value()
    if not math.isfinite(value):
        raise TrainingDivergedError(
            f"training diverged: the loss is {value} by step {step}; "
            "try a smaller training.lr or training.mixed_precision=false"
        )
    return value


class Reporter:
    """Report steps and epochs. A context manager: it owns the curves.

    Every ``log_every_steps`` steps are a log line, unless the launcher shows them on a terminal.
    Reading the loss waits for the device, so it is read only then and once a second; the value
    sent is its mean since the last of those steps.
    """

    def __init__(self, run: Run, cfg: DictConfig) -> None:
        self._run = run
        self._cfg = cfg
        self._every: int = cfg.training.log_every_steps
        self._epochs: int = cfg.training.epochs
        self._recent = LossAverage()
        self._next_reading = 0.0
        self._unsent: dict[str, float] = {}
        self._total_steps = 0
        self._curves: Curves | None = None
        # there its launcher shows the steps
        self._is_watched = run.has_live_status
        self._epoch_started = time.monotonic()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: object, error: object, frames: object) -> None:
        with self._drawing():
            if self._curves is not None:
                self._curves.close(kind is not None)

    def begin(self, position: ResumePosition, total_steps: int) -> None:
        """Report that training starts from ``position``."""
        self._total_steps = total_steps
        self._run.started(position.step)
        if self._run.is_main:
            with self._drawing():
                self._curves = open_curves(self._cfg, self._run, position.step)

    def step(
        self, position: ResumePosition, loss: Tensor, samples: int, lr: float
    ) -> None:
        """Report that optimizer step ``position.step`` is done, with its mean loss."""
        self._recent.add(loss, samples)
        is_first, is_marked = (
            self._next_reading == 0.0,
            position.step % self._every == 0,
        )
        if is_marked or time.monotonic() >= self._next_reading:
            value = checked_loss(self._recent, position.step)
            self._next_reading = time.monotonic() + _READING_INTERVAL_SECONDS
            self._unsent = {"loss": value}
            if is_first or is_marked:
                self._recent = LossAverage()
                self._scalars(position.step, {"train/loss": value, "train/lr": lr})
            if is_marked and not self._is_watched:
                done = f"step {position.step}/{self._total_steps}"
                log.info("%s: loss %.4f, learning rate %.2e", done, value, lr)
        # at most ten a second are sent
        if self._run.progress(
            position.step, total_steps=self._total_steps, lr=lr, **self._unsent
        ):
            self._unsent = {}

    def epoch_begins(self) -> None:
        """Start the clock of the epoch's line."""
        self._epoch_started = time.monotonic()

    def epoch(self, position: ResumePosition, train_loss: float, score: Score) -> None:
        """Report that an epoch is trained and validated."""
        log.info(
            "epoch %d/%d in %.1f s: loss %.4f, validation %.4f, accuracy %.2f %%",
            position.epoch + 1,
            self._epochs,
            time.monotonic() - self._epoch_started,
            train_loss,
            score.loss,
            100 * score.accuracy,
        )
        self._scalars(
            position.step, {"val/accuracy": score.accuracy, "val/loss": score.loss}
        )
        self._run.record_memory(f"epoch {position.epoch + 1}")
        self._run.epoch_ended(
            position.epoch + 1,
            train_loss=train_loss,
            val_loss=score.loss,
            val_accuracy=score.accuracy,
        )

    def _scalars(self, step: int, values: dict[str, float]) -> None:
        with self._drawing():
            if self._curves is not None:
                self._curves.add(values, step)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # a disk that is full, a server that is away
            self._curves = None
            why = first_line(error)
            log.warning(
                "logger=%s: %s; training goes on without", self._cfg.get("logger"), why
            )
