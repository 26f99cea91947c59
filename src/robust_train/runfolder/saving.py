"""An attempt's side of checkpoints: when the next one is due, and the manifests of those saved."""

from __future__ import annotations

import logging
from pathlib import Path

from robust_train.runfolder.cadence import SaveClock, SavePlan
from robust_train.runfolder.identity import read_identity, wait_until_readable
from robust_train.runfolder.manifests import of_job, record_checkpoint, rotate

log = logging.getLogger("robust_train")


class Saving:
    """When an attempt saves, and what it has saved.

    Args:
        run_dir: the job's run folder.
        attempt: number of the attempt.

    Attributes:
        folder: where checkpoints belong.
        job: identity of the job, the same for all of its attempts; empty without a launcher; None
            where nobody would resume and so no manifest is written.
    """

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self.folder = run_dir / "checkpoints"
        identity = wait_until_readable(lambda: read_identity(run_dir))
        self.job: str | None = "" if identity is None else identity.id
        self._attempt = attempt
        self._job_started = None if identity is None else identity.started
        self._plan = SavePlan()
        self._clock: SaveClock | None = None

    @property
    def plan(self) -> SavePlan:
        """How often to save. Whoever calls the trainer sets it from the config."""
        return self._plan

    @plan.setter
    def plan(self, plan: SavePlan) -> None:
        self._plan = plan
        self._clock = None

    @property
    def clock(self) -> SaveClock:
        """What measures the time between checkpoints; made at first use."""
        if self._clock is None:
            known = of_job(self.folder, self.job) if self.job else []
            self._clock = SaveClock(
                self._plan,
                cost=next((one.seconds for one in reversed(known) if one.seconds), None),
                failures=self._attempt - 1,
                job_started=self._job_started,
            )
        return self._clock

    def saved(self, path: Path, step: int | None) -> None:
        """A complete checkpoint lies at ``path``: write its manifest."""
        seconds = self.clock.saved(step)
        if self.job is None:
            return
        step = None if step is None else int(step)
        try:
            record_checkpoint(
                self.folder, path, job=self.job, attempt=self._attempt, step=step, seconds=seconds
            )
        except OSError as error:
            log.warning("no manifest of the checkpoint %s: %s", path, error.strerror or error)

    def rotate(self, pattern: str, keep: int) -> None:
        """Remove all but the newest ``keep`` checkpoints that are called like ``pattern``."""
        if self.job is not None:
            rotate(self.folder, self.job, pattern, keep)
