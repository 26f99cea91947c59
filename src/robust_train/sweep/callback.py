"""Hydra's callback that records a sweep, whichever launcher runs its jobs."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write

from robust_train.compat import returned_or_raised
from robust_train.errors import EXIT_BAD_CONFIG, EXIT_FAILED, ConfigError
from robust_train.execution.hydra_state import adopt_hydra
from robust_train.files import plain
from robust_train.nodes.place import node_in
from robust_train.readable import named_line
from robust_train.runfolder import detach
from robust_train.runfolder.lock import refusal
from robust_train.settings import detaches, early_settings, hide_urls
from robust_train.sweep import current, session
from robust_train.sweep.plugins_of_others import restore_mask


class SweepCallback(Callback):
    """Instantiated by Hydra from ``hydra.callbacks``; pickled into the jobs' processes."""

    def __init__(self) -> None:
        self._launcher: str | None = None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the job before anything is written to its run folder."""
        hide_urls(config)
        node = node_in(os.environ, early_settings(config).num_nodes)
        run_dir = Path(str(config.hydra.run.dir))
        problem = None if node else refusal(run_dir)
        if problem is not None:
            _refuse(problem)
        try:
            session.check_job(config)
        except ConfigError as error:
            _refuse(str(error), node, run_dir)
        if detaches(config):
            raise SystemExit(detach.start())

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Begin the sweep, before the launcher is made."""
        hide_urls(config)
        self._launcher = str(config.hydra.runtime.choices.get("hydra/launcher"))
        try:
            if not detach.is_detached:
                session.check_jobs(config)
            if detaches(config):
                raise SystemExit(detach.start())
            with contextlib.suppress(OSError):  # Hydra fails at the same, with a message
                session.begin(config)
        except ConfigError as error:
            _refuse(str(error))
        except Exception:  # Hydra would warn, and run a sweep of which there is no record
            traceback.print_exc()
            raise SystemExit(EXIT_FAILED) from None

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Enter the job, in its own process, once its run folder is there."""
        restore_mask(os.environ)
        if hide_urls(config):  # of a project's file: Hydra has just written its value
            _hide_in(Path(str(config.hydra.runtime.output_dir)) / str(config.hydra.output_subdir))
        if node := node_in(os.environ, early_settings(config).num_nodes):
            _log_apart(config, node)
        current.enter(config, self._launcher, follows=node > 0)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Record the end of the job's function, unless it was interrupted."""
        if job_return.status is JobStatus.COMPLETED:
            current.job_ended("completed", 0, objective=plain(job_return.return_value))
        else:
            current.job_ended("failed", 1, reason=named_line(returned_or_raised(job_return)))
        current.leave()

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Finish the sweep after its last job, unless a job's error has ended it."""
        code = session.finish()
        if code and not session.program.has_door:
            # not an Exception: those of callbacks are turned into warnings
            raise SystemExit(code)


def _log_apart(config: DictConfig, node: int) -> None:
    """Have this node write a log of its own: it has begun with node 0's."""
    with read_write(config.hydra):
        config.hydra.job.name += f".node{node}"
    adopt_hydra(config)
    HydraConfig.instance().set_config(config)


def _hide_in(folder: Path) -> None:
    with contextlib.suppress(OSError):
        cfg = OmegaConf.load(folder / "config.yaml")
        OmegaConf.update(cfg, "notify.urls", None)
        OmegaConf.save(cfg, folder / "config.yaml")


def _refuse(problem: str, node: int = 0, run_dir: Path = Path()) -> NoReturn:
    print(problem, file=sys.stderr)
    if node:
        from robust_train.nodes.connection import send_refusal

        send_refusal(run_dir, node, problem)
    # not an Exception: those of callbacks are turned into warnings
    raise SystemExit(EXIT_BAD_CONFIG)
