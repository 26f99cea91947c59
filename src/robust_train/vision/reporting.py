"""What a run says while it trains: the screen, TensorBoard, the launcher."""

from __future__ import annotations

import logging
import math
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from robust_train.run import Run
from robust_train.vision.evaluation import Score
from robust_train.vision.state import LossAverage, Place

log = logging.getLogger("robust_train.vision")

_READING_INTERVAL_SECONDS = 1.0


class TrainingDivergedError(RuntimeError):
    """The loss is no finite number any more; going on would only spoil the checkpoints."""


def checked_loss(average: LossAverage, step: int) -> float:
    """The average's value.

    Raises:
        TrainingDivergedError: it is infinite or no number.
    """
    value = average.value()
    if not math.isfinite(value):
        raise TrainingDivergedError(
            f"training diverged: the loss is {value} by step {step}; "
            "try a smaller training.lr or training.mixed_precision=false"
        )
    return value


class Reporter:
    """Reports steps and epochs. A context manager: it holds the progress bar and event file.

    On a terminal a progress bar, elsewhere a log line every ``log_every_steps`` steps. The loss is
    read from the device only as often and once a second, for reading waits for the device; what
    is told is its mean since the last of those steps.

    Args:
        run: the launcher's side.
        log_every_steps: see above.
        epochs: of the whole run.
    """

    def __init__(self, run: Run, *, log_every_steps: int, epochs: int) -> None:
        self._run = run
        self._every = log_every_steps
        self._epochs = epochs
        self._recent = LossAverage()
        self._next_reading = 0.0
        self._untold: dict[str, float] = {}
        self._total_steps = 0
        self._bar: Any = None
        self._board: Any = None
        self._open = ExitStack()
        self._epoch_started = time.monotonic()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        self._open.close()

    def begin(self, place: Place, total_steps: int) -> None:
        """Training goes on from ``place``."""
        self._total_steps = total_steps
        self._run.started(place.step)
        if not self._run.is_main:
            return
        self._board = _open_board(self._run.run_dir / "tensorboard", purge_step=place.step + 1)
        if self._board is not None:
            self._open.callback(self._close_board)
        if sys.stderr.isatty():
            self._open_bar(place.step)

    def step(self, place: Place, loss: Tensor, samples: int, lr: float) -> None:
        """Optimizer step ``place.step`` is done, with this mean loss over its samples."""
        self._recent.add(loss, samples)
        if self._bar is not None:
            self._bar.update(1)
        is_first, is_marked = self._next_reading == 0.0, place.step % self._every == 0
        if is_marked or time.monotonic() >= self._next_reading:
            value = checked_loss(self._recent, place.step)
            self._next_reading = time.monotonic() + _READING_INTERVAL_SECONDS
            self._untold = {"loss": value}
            if self._bar is not None:
                self._bar.set_postfix(loss=f"{value:.4f}", refresh=False)
            if is_first or is_marked:
                self._recent = LossAverage()
                self._scalars(place.step, {"train/loss": value, "train/lr": lr})
            if is_marked and self._bar is None:
                log.info(
                    "step %d/%d: loss %.4f, learning rate %.2e",
                    place.step,
                    self._total_steps,
                    value,
                    lr,
                )
        # the launcher passes on ten a second at most
        if self._run.progress(place.step, total_steps=self._total_steps, lr=lr, **self._untold):
            self._untold = {}

    def epoch_begins(self) -> None:
        """For the duration in the epoch's line."""
        self._epoch_started = time.monotonic()

    def epoch(self, place: Place, train_loss: float, score: Score) -> None:
        """An epoch is trained and validated."""
        log.info(
            "epoch %d/%d: loss %.4f, validation loss %.4f, validation accuracy %.2f %%, %.1f s",
            place.epoch + 1,
            self._epochs,
            train_loss,
            score.loss,
            100 * score.accuracy,
            time.monotonic() - self._epoch_started,
        )
        self._scalars(place.step, {"val/accuracy": score.accuracy, "val/loss": score.loss})
        self._run.memory_milestone(f"epoch {place.epoch + 1}")
        self._run.epoch_ended(
            place.epoch + 1,
            train_loss=train_loss,
            val_loss=score.loss,
            val_accuracy=score.accuracy,
        )

    def _open_bar(self, step: int) -> None:
        try:
            from tqdm import tqdm
            from tqdm.contrib.logging import logging_redirect_tqdm
        except ImportError:
            log.info('no progress bar: pip install "robust-train[vision]"')
            return
        # log lines would tear the bar apart
        self._open.enter_context(logging_redirect_tqdm())
        self._bar = self._open.enter_context(
            tqdm(total=self._total_steps, initial=step, unit="step", dynamic_ncols=True)
        )

    def _scalars(self, step: int, values: dict[str, float]) -> None:
        if self._board is None:
            return
        try:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        except OSError as error:
            log.warning("TensorBoard: cannot write (%s); training goes on without", error)
            self._board = None

    def _close_board(self) -> None:
        if self._board is None:
            return
        try:
            self._board.close()
        except OSError as error:
            log.warning("TensorBoard: cannot write (%s)", error)


def _open_board(folder: Path, *, purge_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        log.info('no TensorBoard scalars: pip install "robust-train[vision]"')
        return None
    try:
        # a resumed run draws over the steps that the failed attempt made after its checkpoint
        return SummaryWriter(str(folder), purge_step=purge_step if purge_step > 1 else None)
    except OSError as error:
        log.warning("TensorBoard: cannot write (%s); training goes on without", error)
        return None
