"""Reports a run's progress to the screen, to the launcher, and to TensorBoard.

`vision.trainer.train` creates a `Reporter` in the process of each rank. Only the main rank draws
curves.
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

_READING_INTERVAL_SECONDS = 1.0


class Reporter:
    """Reports steps and epochs. As a context manager it closes the curves.

    It logs a line every ``log_every_steps`` steps, unless the launcher shows them on a terminal.
    Reading the loss waits for the device, so it is read only then and once a second. The reported
    value is the mean since the last of these steps.
    """

    def __init__(self, run: Run, cfg: DictConfig) -> None:
        self._run = run
        self._cfg = cfg
        self._every: int = cfg.training.log_every_steps
        self._recent = LossAverage()
        self._next_reading = 0.0
        self._unsent: dict[str, float] = {}
        self._total_steps = 0
        self._board: SummaryWriter | None = None
        self._epoch_started = time.monotonic()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: object, error: object, frames: object) -> None:
        with self._drawing():
            if self._board is not None:
                self._board.close()

    def begin(self, position: EpochPosition, total_steps: int) -> None:
        """Report that training starts from ``position``."""
        self._total_steps = total_steps
        self._run.started(position.step)
        if self._run.is_main:
            with self._drawing():
                self._board = _open_board(self._cfg, self._run, position.step)

    def step(
        self,
        position: EpochPosition,
        loss: Tensor,
        samples: int,
        lr: float,
        *,
        finite: bool = False,  # passed to `LossAverage.add`
    ) -> None:
        """Report that optimizer step ``position.step`` is done, with its mean loss."""
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
        # At most ten reports a second are sent.
        if self._run.progress(step, total_steps=self._total_steps, lr=lr, **self._unsent):
            self._unsent = {}

    def epoch_begins(self) -> None:
        """Start to measure the time of an epoch for its log line."""
        self._epoch_started = time.monotonic()

    def epoch(self, position: EpochPosition, train_loss: float, score: Score) -> None:
        """Report that an epoch is trained and validated."""
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
        with self._drawing():
            if self._board is not None:
                for name, value in values.items():
                    self._board.add_scalar(name, value, step)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        try:
            yield
        # for example, a full disk
        except Exception as error:
            self._board = None
            log.warning(
                "logger=%s: %s; training continues without",
                self._cfg.get("logger"),
                first_line(error),
            )


def _open_board(cfg: DictConfig, run: Run, step: int) -> SummaryWriter | None:
    """Return the writer of a run that resumes from ``step``, or None if nothing draws its
    curves."""
    if logger_of(cfg) == "none":
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        log.info('no TensorBoard scalars: pip install "robust-train[vision]"')
        return None
    # TensorBoard drops the points of steps that were lost: the resumed run repeats those steps.
    return SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=step + 1 if step else None)
