"""Where the built-in trainer draws its curves: ``logger=tensorboard|wandb|mlflow|none``."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig, OmegaConf

from robust_train.config.extras import require
from robust_train.errors import ConfigError
from robust_train.run import Run
from robust_train.runfolder.trackers import MLFLOW_ID

log = logging.getLogger("robust_train.vision")

NAMES = ("tensorboard", "wandb", "mlflow", "none")
_PROJECT = "robust-train"


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


class Curves(Protocol):
    """Takes scalars over optimizer steps. Whatever it raises ends the drawing, not the job."""

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Draw the values at ``step``."""

    def close(self, *, has_failed: bool) -> None: ...


def open_curves(cfg: DictConfig, run: Run, step: int) -> Curves | None:
    """Return what draws the curves of a run that resumes from ``step``; None for nothing."""
    name = chosen(cfg)
    if name == "tensorboard":
        try:
            return _TensorBoard(run.run_dir, step)
        except ImportError:
            log.info('no TensorBoard scalars: pip install "robust-train[vision]"')
    if name == "wandb":
        return _Wandb(cfg, run.run_dir)
    if name == "mlflow":
        curves = _Mlflow(cfg, run.run_dir)
        run.trackers.poll()
        return curves
    return None


class _TensorBoard:
    """An event file; a resumed run draws over the steps that were lost."""

    def __init__(self, run_dir: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = str(run_dir / "tensorboard")
        self._board = SummaryWriter(folder, purge_step=step + 1 if step else None)

    def add(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self, *, has_failed: bool) -> None:
        self._board.close()


class _Wandb:
    """The run that ``WANDB_RUN_ID`` names; offline where the service cannot be used."""

    def __init__(self, cfg: DictConfig, run_dir: Path) -> None:
        wandb: Any = require("wandb", "logger=wandb", extra="wandb")
        ours = {"project": _PROJECT, "name": run_dir.name, "dir": str(run_dir)}
        # an argument would win over the user's own variable
        given: dict[str, Any] = {
            name: value for name, value in ours.items() if f"WANDB_{name.upper()}" not in os.environ
        }
        given["config"] = OmegaConf.to_container(cfg, resolve=True)
        # what an attempt prints is in the run folder
        settings = {} if "WANDB_CONSOLE" in os.environ else {"console": "off"}
        try:
            self._run = wandb.init(**given, settings=wandb.Settings(**settings))
        except Exception as error:
            log.warning("wandb: %s; logged to %s: wandb sync sends it", error, run_dir / "wandb")
            self._run = wandb.init(**given, settings=wandb.Settings(**settings, mode="offline"))

    def add(self, values: Mapping[str, float], step: int) -> None:
        if step >= self._run.step:  # of a resumed run, wandb itself refuses what it has
            self._run.log(dict(values), step=step)

    def close(self, *, has_failed: bool) -> None:
        self._run.finish(exit_code=int(has_failed))


class _Mlflow:
    """The run that ``MLFLOW_RUN_ID`` names, else a new one; without steps that it has already."""

    def __init__(self, cfg: DictConfig, run_dir: Path) -> None:
        self._mlflow: Any = require("mlflow", "logger=mlflow", extra="mlflow")
        is_new = not os.environ.get(MLFLOW_ID)
        run_id = self._mlflow.start_run(run_name=run_dir.name).info.run_id
        client = self._mlflow.MlflowClient()
        self._last = functools.cache(
            lambda name: max((m.step for m in client.get_metric_history(run_id, name)), default=-1)
        )
        if is_new:  # parameters cannot be changed later
            groups = ("model", "dataset", "training")
            self._mlflow.log_params({f"{g}.{k}": v for g in groups for k, v in cfg[g].items()})

    def add(self, values: Mapping[str, float], step: int) -> None:
        new = {name: value for name, value in values.items() if step > self._last(name)}
        self._mlflow.log_metrics(new, step=step)

    def close(self, *, has_failed: bool) -> None:
        self._mlflow.end_run("FAILED" if has_failed else "FINISHED")
