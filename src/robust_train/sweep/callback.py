"""Hydra's callback that records a sweep, whichever launcher runs its jobs."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from robust_train.compat import returned_or_raised
from robust_train.config.checks import hide_urls, unchecked
from robust_train.files import plain
from robust_train.folder.lock import refusal
from robust_train.host.engine import guest_rank
from robust_train.launcher import detach
from robust_train.model.errors import EXIT_BAD_CONFIG, EXIT_FAILED, ConfigError
from robust_train.readable import named_line
from robust_train.sweep import current, session
from robust_train.sweep.plugins_of_others import restore_mask
from robust_train.sweep.program import program


class SweepCallback(Callback):
    """Instantiated by Hydra from ``hydra.callbacks``; pickled into the jobs' processes."""

    def __init__(self) -> None:
        self._launcher: str | None = None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the job before anything is written to its run folder."""
        hide_urls(config)
        guest = guest_rank(os.environ)
        is_first = guest is None or guest.rank == 0  # the other ranks find its lock
        problem = refusal(Path(str(config.hydra.run.dir))) if is_first else None
        if problem is not None:
            _refuse(problem)
        try:
            session.check_job(config)
        except ConfigError as error:
            _refuse(str(error))
        if detach.is_due(unchecked(config)):
            raise SystemExit(detach.start())

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Begin the sweep, before the launcher is made."""
        hide_urls(config)
        self._launcher = str(config.hydra.runtime.choices.get("hydra/launcher"))
        try:
            if not detach.is_detached:
                session.check_jobs(config)
            if detach.is_due(unchecked(config)):
                raise SystemExit(detach.start())
            with contextlib.suppress(
                OSError
            ):  # Hydra fails at the same, with a message
                session.begin(config)
        except ConfigError as error:
            _refuse(str(error))
        except (
            Exception
        ):  # Hydra would warn, and run a sweep of which there is no record
            traceback.print_exc()
            raise SystemExit(EXIT_FAILED) from None

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Enter the job, in its own process, once its run folder is there."""
        restore_mask(os.environ)
        if hide_urls(config):  # of a project's file: Hydra has just written its value
            _hide_in(
                Path(str(config.hydra.runtime.output_dir))
                / str(config.hydra.output_subdir)
            )
        program.job = current.enter(config, self._launcher)

    def on_job_end(
        self, config: DictConfig, job_return: JobReturn, **kwargs: Any
    ) -> None:
        """Record the end of the job's function, unless it was interrupted."""
        job, program.job = program.job, None
        if job is None:
            return
        if job_return.status is JobStatus.COMPLETED:
            job.ended("completed", 0, result=plain(job_return.return_value))
        else:
            job.ended("failed", 1, reason=named_line(returned_or_raised(job_return)))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Finish the sweep after its last job, unless a job's error has ended it."""
        code = session.finish()
        if code and not program.sets_exit_code:
            # not an Exception: those of callbacks are turned into warnings
            raise SystemExit(code)


def _hide_in(folder: Path) -> None:
    with contextlib.suppress(OSError):
        cfg = OmegaConf.load(folder / "config.yaml")
        OmegaConf.update(cfg, "notify.urls", None)
        OmegaConf.save(cfg, folder / "config.yaml")


def _refuse(problem: str) -> NoReturn:
    print(problem, file=sys.stderr)
    # not an Exception: those of callbacks are turned into warnings
    raise SystemExit(EXIT_BAD_CONFIG)
