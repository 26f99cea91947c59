"""Which job of a sweep is next, and whose it is.

Several launchers may share a sweep's folder. Whoever works on a point has its byte of a file there
locked, and so have its jobs, which are forks: a killed launcher leaves no point that no one takes
over, and none that two work on.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robust_train.host.linux import is_locked, lock, unlock
from robust_train.model.errors import ConfigError
from robust_train.model.events import ValueReported
from robust_train.sweep.record import SweepJob, common

CLAIMS_FILE, STUDY_FILE = "claims", "study.jsonl"
Job = tuple[int, Sequence[str]]
"""A job's number and its overrides."""


@dataclass(frozen=True)
class SweeperSettings:
    """``hydra.sweeper`` of our sweepers."""

    sampler: Mapping[str, Any] | None = None  # None: every combination once
    pruner: Mapping[str, Any] | None = None
    direction: str = "maximize"
    n_trials: int = 20
    n_jobs: int | None = None
    repeat: int = 1
    seed_key: str = "training.seed"
    params: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("n_trials", "repeat", "n_jobs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"hydra.sweeper.{name}={value}: must be 1 or more")
        if self.direction not in ("maximize", "minimize"):
            raise ConfigError(
                f"hydra.sweeper.direction={self.direction}: must be maximize or minimize"
            )


class Points:
    """What a sweep runs."""

    most: int  # jobs in all
    fixed: Sequence[str] = ()  # overrides that all have
    prunes = False  # whether :meth:`reported` may stop a job

    def next(self) -> Job | None:
        """Return a job to start now; None: there is none at this moment."""
        raise NotImplementedError

    def reported(
        self,
        job: int,
        values: Sequence[ValueReported],
    ) -> str | None:
        """Take what a job has reported; return why it is stopped early, None if it is not."""
        return None

    def ended(self, row: SweepJob) -> None:
        """Take how a job that :meth:`next` has returned has ended."""
        raise NotImplementedError

    @property
    def is_over(self) -> bool:
        """Whether no more job will come, now that none runs here."""
        raise NotImplementedError


class Claims:
    """The points of the sweep in ``folder`` that this launcher works on."""

    def __init__(self, folder: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(folder / CLAIMS_FILE, flags, 0o600)

    def take(self, point: int) -> bool:
        """Return whether the point is this launcher's until :meth:`release`."""
        try:
            return lock(self._fd, 1 + point)
        except OSError:  # the disk has no locks: no second launcher is let in
            return True

    def release(self, point: int) -> None:
        """Leave the point to others."""
        with contextlib.suppress(OSError):
            unlock(self._fd, 1 + point)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other launchers from doing the same meanwhile."""
        # a process's own lock, which forks do not inherit: free as soon as the launcher is killed
        with contextlib.suppress(OSError):
            fcntl.lockf(self._fd, fcntl.LOCK_EX, 1)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1)

    def close(self) -> None:
        """Release all points that no job works on any more."""
        os.close(self._fd)


def others_work(folder: Path) -> bool:
    """Return whether a launcher, or a job that one has left, works on a point of a sweep."""
    with contextlib.suppress(OSError), (folder / CLAIMS_FILE).open("rb") as file:
        return is_locked(file.fileno())
    return False


class Listed(Points):
    """Jobs that are known from the start: a grid, a list, or the batch of a sweeper."""

    def __init__(
        self,
        jobs: Mapping[int, Sequence[str]],
        claims: Claims,
    ) -> None:
        self.most, self.fixed = len(jobs), common(list(jobs.values()))
        self._waiting, self._claims = dict(jobs), claims

    def next(self) -> Job | None:
        """Return the first job that no other launcher works on."""
        for number, overrides in self._waiting.items():
            if self._claims.take(number):
                del self._waiting[number]
                return number, overrides
        return None

    def ended(self, row: SweepJob) -> None:
        """Leave the job to others; one that completed they find completed."""
        self._claims.release(row.job or 0)

    @property
    def is_over(self) -> bool:
        """Whether all were taken."""
        return not self._waiting
