"""Where the built-in trainer draws its curves: ``logger=tensorboard|wandb|mlflow|none``."""

from __future__ import annotations

import difflib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from robust_train.attempt.run import Run
from robust_train.config.trainers import require
from robust_train.model.errors import ConfigError

log = logging.getLogger("robust_train.vision")

NAMES = ("tensorboard", "wandb", "mlflow", "none")


def chosen(cfg: DictConfig) -> str:
    """Return ``logger`` of the config. Raises ConfigError: there is no such logger, or its library
    is not installed."""
    name = str(cfg.get("logger") or "none")
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"logger={name}: accepted are {', '.join(NAMES)}{hint}")
    # found, not imported: that takes seconds, and the attempt does it
    if name in ("wandb", "mlflow") and importlib.util.find_spec(name) is None:
        require(name, f"logger={name}", extra=name)
    return name


@dataclass(frozen=True)
class Curves:
    """Takes scalars over optimizer steps. Whatever it raises ends the drawing, not the job."""

    add: Callable[[dict[str, float], int], object]  # draws values at a step
    close: Callable[[bool], object]  # is given whether the run has failed


def open_curves(cfg: DictConfig, run: Run, step: int) -> Curves | None:
    """Return what draws the curves of a run that resumes from ``step``; None for nothing."""
    name = chosen(cfg)
    if name == "wandb":
        wandb: Any = require("wandb", "logger=wandb", extra="wandb")
        config: Any = OmegaConf.to_container(cfg, resolve=True)
        made = wandb.init(name=run.run_dir.name, dir=str(run.run_dir), config=config)
        return Curves(
            made.log, lambda has_failed: made.finish(exit_code=int(has_failed))
        )
    if name == "mlflow":
        mlflow: Any = require("mlflow", "logger=mlflow", extra="mlflow")
        mlflow.start_run(run_name=run.run_dir.name)
        run.trackers.poll()
        return Curves(
            mlflow.log_metrics,
            lambda has_failed: mlflow.end_run("FAILED" if has_failed else "FINISHED"),
        )
    return _tensorboard(run.run_dir, step) if name == "tensorboard" else None


def _tensorboard(run_dir: Path, step: int) -> Curves | None:
    """Return an event file; a resumed run draws over the steps that were lost."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        log.info('no TensorBoard scalars: pip install "robust-train[vision]"')
        return None
    board = SummaryWriter(
        str(run_dir / "tensorboard"), purge_step=step + 1 if step else None
    )

    def add(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            board.add_scalar(name, value, step)

    return Curves(add, lambda has_failed: board.close())
