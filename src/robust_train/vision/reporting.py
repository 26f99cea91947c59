"""Reports the progress of the built-in trainer to the log, the launcher and TensorBoard.

`vision.trainer.train` creates a `Reporter` in the process of each rank. Only the main rank writes
to TensorBoard.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from omegaconf import DictConfig
from torch import Tensor

from robust_train.attempt.run import Run, live_of
from robust_train.readable import first_line
from robust_train.vision.keys import logger_of
from robust_train.vision.step import EpochPosition, LossAverage, Score

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger("robust_train.vision")

_READING_INTERVAL_SECONDS = 1.0  # between two readings of the loss, at most


class Reporter:
    """Reports steps and epochs. Leaving its ``with`` block closes TensorBoard's file.

    Every ``log_every_steps`` steps, it logs the mean loss since the last such step, unless the
    launcher shows the steps on a terminal. Reading the loss waits for the device, so the loss is
    only read in these steps and once a second.
    """

    def __init__(self, run: Run, cfg: DictConfig) -> None:
        self._run = run
        self._cfg = cfg
        self._every: int = cfg.training.log_every_steps
        self._recent = LossAverage()  # since the last step with a log line
        self._next_reading = 0.0
        self._unsent: dict[str, float] = {}  # the loss, until the launcher receives it
        self._total_steps = 0
        self._board: SummaryWriter | None = None
        self._epoch_started = time.monotonic()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: object, error: object, frames: object) -> None:
        with self._drop_failing_board():
            if self._board is not None:
                self._board.close()

    def report_start(self, position: EpochPosition, total_steps: int) -> None:
        """Report that training starts from ``position``."""
        self._total_steps = total_steps
        self._run.started(position.step)
        if self._run.is_main:
            with self._drop_failing_board():
                self._board = _open_board(self._cfg, self._run, position.step)

    def report_step(
        self,
        position: EpochPosition,
        loss: Tensor,
        samples: int,
        lr: float,
        *,
        finite: bool = False,
    ) -> None:
        """Report that optimizer step ``position.step`` is done.

        Args:
            position: the position after the step.
            loss: the mean loss of the step.
            samples: the samples of the step.
            lr: the learning rate of the step.
            finite: whether a loss that is not finite is left out, because its update was skipped.
        """
        step = position.step
        self._recent.add(loss, samples, finite=finite)
        is_first = self._next_reading == 0.0
        is_marked = step % self._every == 0
        if is_marked or time.monotonic() >= self._next_reading:
            value = self._recent.value()
            self._next_reading = time.monotonic() + _READING_INTERVAL_SECONDS
            self._unsent = {"loss": value}
            live_of(self._run).losses.take(step, value)
            if is_first or is_marked:
                self._recent = LossAverage()
                self._draw(step, {"train/loss": value, "train/lr": lr})
            if is_marked and not live_of(self._run).has_live_status:
                log.info(
                    "step %d/%d: loss %.4f, learning rate %.2e", step, self._total_steps, value, lr
                )
        # The launcher gets at most ten reports a second.
        was_sent = self._run.progress(step, total_steps=self._total_steps, lr=lr, **self._unsent)
        if was_sent:
            self._unsent = {}

    def start_epoch(self) -> None:
        """Start measuring the time of an epoch for its log line."""
        self._epoch_started = time.monotonic()

    def report_epoch(self, position: EpochPosition, train_loss: float, score: Score) -> None:
        """Report the training loss of an epoch and the score of its validation."""
        epoch = position.epoch + 1
        log.info(
            "epoch %d/%d in %.1f s: loss %.4f, validation %.4f, accuracy %.2f %%",
            epoch,
            self._cfg.training.epochs,
            time.monotonic() - self._epoch_started,
            train_loss,
            score.loss,
            100 * score.accuracy,
        )
        self._draw(position.step, {"val/accuracy": score.accuracy, "val/loss": score.loss})
        live_of(self._run).reports.record_memory(f"epoch {epoch}")
        self._run.report(score.accuracy, epoch)
        self._run.epoch_ended(
            epoch, train_loss=train_loss, val_loss=score.loss, val_accuracy=score.accuracy
        )

    def _draw(self, step: int, values: dict[str, float]) -> None:
        """Add a point to each of TensorBoard's curves."""
        with self._drop_failing_board():
            if self._board is not None:
                for name, value in values.items():
                    self._board.add_scalar(name, value, step)

    @contextmanager
    def _drop_failing_board(self) -> Iterator[None]:
        """Stop writing to TensorBoard if the block raises, for example because the disk is full."""
        try:
            yield
        except Exception as error:
            self._board = None
            log.warning(
                "logger=%s: %s; training continues without its curves",
                self._cfg.get("logger"),
                first_line(error),
            )


def _open_board(cfg: DictConfig, run: Run, step: int) -> SummaryWriter | None:
    """Return TensorBoard's writer, or None if the run has no curves.

    ``step`` is the step from which the run resumes, 0 if it starts.
    """
    if logger_of(cfg) == "none":
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        log.info('no TensorBoard scalars: pip install "robust-train[vision]"')
        return None
    # A resumed run repeats the steps after its checkpoint, so TensorBoard drops their old points.
    first_step = step + 1 if step else None
    return SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=first_step)
