"""Report a run's progress: screen, TensorBoard, launcher."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from robust_train.run import Run
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
    """Report steps and epochs. A context manager: it owns TensorBoard's event file.

    Every ``log_every_steps`` steps are a log line, unless the launcher shows them on a terminal.
    Reading the loss waits for the device, so it is read only then and once a second; the value
    sent is its mean since the last of those steps.
    """

    def __init__(self, run: Run, *, log_every_steps: int, epochs: int) -> None:
        self._run = run
        self._every = log_every_steps
        self._epochs = epochs
        self._recent = LossAverage()
        self._next_reading = 0.0
        self._unsent: dict[str, float] = {}
        self._total_steps = 0
        self._board: Any = None
        # there its launcher shows the steps
        self._is_watched = run.has_live_status
        self._epoch_started = time.monotonic()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *error: object) -> None:
        with self._board_errors():
            if self._board is not None:
                self._board.close()

    def begin(self, position: ResumePosition, total_steps: int) -> None:
        """Report that training starts from ``position``."""
        self._total_steps = total_steps
        self._run.started(position.step)
        if self._run.is_main:
            self._open_board(position.step)

    def step(self, position: ResumePosition, loss: Tensor, samples: int, lr: float) -> None:
        """Report that optimizer step ``position.step`` is done, with its mean loss."""
        self._recent.add(loss, samples)
        is_first, is_marked = self._next_reading == 0.0, position.step % self._every == 0
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
        if self._run.progress(position.step, total_steps=self._total_steps, lr=lr, **self._unsent):
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
        self._scalars(position.step, {"val/accuracy": score.accuracy, "val/loss": score.loss})
        self._run.record_memory(f"epoch {position.epoch + 1}")
        self._run.epoch_ended(
            position.epoch + 1,
            train_loss=train_loss,
            val_loss=score.loss,
            val_accuracy=score.accuracy,
        )

    def _open_board(self, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            log.info('no TensorBoard scalars: pip install "robust-train[vision]"')
            return
        with self._board_errors():
            # a resumed run draws over the steps that the failed attempt made after its checkpoint
            folder = str(self._run.run_dir / "tensorboard")
            self._board = SummaryWriter(folder, purge_step=step + 1 if step else None)

    def _scalars(self, step: int, values: dict[str, float]) -> None:
        with self._board_errors():
            for name, value in values.items():
                if self._board is not None:
                    self._board.add_scalar(name, value, step)

    @contextmanager
    def _board_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._board = None
            log.warning("TensorBoard: cannot write (%s); training goes on without", error)
