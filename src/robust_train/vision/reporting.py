"""Report a run's progress: screen, launcher, and curves by ``logger=tensorboard|wandb|mlflow``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from robust_train.attempt.run import Run
from robust_train.config.trainers import require
from robust_train.model.errors import ConfigError
from robust_train.readable import first_line
from robust_train.vision.keys import logger_of
from robust_train.vision.step import EpochPosition, LossAverage, Score

log = logging.getLogger("robust_train.vision")

_READING_INTERVAL_SECONDS = 1.0


class Reporter:
    """Report steps and epochs. A context manager: it owns the curves.

    Every ``log_every_steps`` steps are a log line, unless the launcher shows them on a terminal.
    Reading the loss waits for the device, so it is read only then and once a second; the value
    sent is its mean since the last of those steps.
    """

    def __init__(
        self,
        run: Run,
        cfg: DictConfig,
    ) -> None:
        self._run = run
        self._cfg = cfg
        self._every: int = cfg.training.log_every_steps
        self._recent = LossAverage()
        self._next_reading = 0.0
        self._unsent: dict[str, float] = {}
        self._total_steps = 0
        self._curves: _Curves | None = None
        self._epoch_started = time.monotonic()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self,
        kind: object,
        error: object,
        frames: object,
    ) -> None:
        with self._drawing():
            if self._curves is not None:
                self._curves.close(kind is not None)

    def begin(
        self,
        position: EpochPosition,
        total_steps: int,
    ) -> None:
        """Report that training starts from ``position``."""
        self._total_steps = total_steps
        self._run.started(position.step)
        if self._run.is_main:
            with self._drawing():
                self._curves = _open_curves(
                    self._cfg,
                    self._run,
                    position.step,
                )

    def step(
        self,
        position: EpochPosition,
        loss: Tensor,
        samples: int,
        lr: float,
    ) -> None:
        """Report that optimizer step ``position.step`` is done, with its mean loss."""
        step = position.step
        self._recent.add(loss, samples)
        is_first = self._next_reading == 0.0
        is_marked = step % self._every == 0
        if is_marked or time.monotonic() >= self._next_reading:
            value = self._recent.value()
            self._next_reading = time.monotonic() + _READING_INTERVAL_SECONDS
            self._unsent = {"loss": value}
            self._run.guard.take(step, value)
            if is_first or is_marked:
                self._recent = LossAverage()
                self._draw(step, {"train/loss": value, "train/lr": lr})
            if is_marked and not self._run.has_live_status:
                log.info(
                    "step %d/%d: loss %.4f, learning rate %.2e",
                    step,
                    self._total_steps,
                    value,
                    lr,
                )
        # at most ten a second are sent
        if self._run.progress(
            step,
            total_steps=self._total_steps,
            lr=lr,
            **self._unsent,
        ):
            self._unsent = {}

    def epoch_begins(self) -> None:
        """Start the clock of the epoch's line."""
        self._epoch_started = time.monotonic()

    def epoch(
        self,
        position: EpochPosition,
        train_loss: float,
        score: Score,
    ) -> None:
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
        self._draw(
            position.step,
            {"val/accuracy": score.accuracy, "val/loss": score.loss},
        )
        self._run.record_memory(f"epoch {epoch}")
        self._run.report(score.accuracy, epoch)
        self._run.epoch_ended(
            epoch,
            train_loss=train_loss,
            val_loss=score.loss,
            val_accuracy=score.accuracy,
        )

    def _draw(self, step: int, values: dict[str, float]) -> None:
        with self._drawing():
            if self._curves is not None:
                self._curves.add(values, step)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        # a disk that is full, a server that is away
        except Exception as error:
            self._curves = None
            log.warning(
                "logger=%s: %s; training goes on without",
                self._cfg.get("logger"),
                first_line(error),
            )


@dataclass(frozen=True)
class _Curves:
    """Takes scalars over optimizer steps. Whatever it raises ends the drawing, not the job."""

    add: Callable[[dict[str, float], int], object]  # draws values at a step
    close: Callable[[bool], object]  # is given whether the run has failed


def _open_curves(
    cfg: DictConfig,
    run: Run,
    step: int,
) -> _Curves | None:
    """Return what draws the curves of a run that resumes from ``step``; None if nothing does."""
    name = logger_of(cfg)
    if name == "wandb":
        made = require("wandb", "logger=wandb", extra="wandb").init(
            name=run.run_dir.name,
            dir=str(run.run_dir),
            config=OmegaConf.to_container(cfg, resolve=True),
        )
        return _Curves(
            made.log, lambda has_failed: made.finish(int(has_failed))
        )
    if name == "mlflow":
        mlflow = require("mlflow", "logger=mlflow", extra="mlflow")
        mlflow.start_run(run_name=run.run_dir.name)
        run.trackers.poll()
        return _Curves(
            mlflow.log_metrics,
            lambda has_failed: mlflow.end_run(
                "FAILED" if has_failed else "FINISHED"
            ),
        )
    if name == "none":
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        log.info('no TensorBoard scalars: pip install "robust-train[vision]"')
        return None
    folder = str(run.run_dir / "tensorboard")
    # a resumed run draws over the steps that were lost
    board = SummaryWriter(folder, purge_step=step + 1 if step else None)

    def add(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            board.add_scalar(name, value, step)

    return _Curves(add, lambda has_failed: board.close())
