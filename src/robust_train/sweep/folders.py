"""The run folder of a sweep's job, before the job is there."""

from __future__ import annotations

import contextlib
import copy
import os
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

LOG_FILE = "output.log"


def run_folder(config: DictConfig) -> Path:
    """Where it will be, as Hydra will make it."""
    config = copy.deepcopy(config)
    before = HydraConfig.instance().cfg
    try:
        HydraConfig.instance().set_config(config)  # ``${hydra:…}`` looks there
        folder = str(OmegaConf.select(config, "hydra.sweep.dir"))
        return Path(os.path.abspath(os.path.join(folder, str(config.hydra.sweep.subdir))))
    finally:
        HydraConfig.instance().cfg = before


def remove_untouched(folder: Path | None) -> None:
    """A job that was ready and never begun leaves no folder with an empty log."""
    if folder is None:
        return
    with contextlib.suppress(OSError):
        log_file = folder / LOG_FILE
        if log_file.stat().st_size == 0:
            log_file.unlink()
        folder.rmdir()
