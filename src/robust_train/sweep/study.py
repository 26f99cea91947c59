"""A search as it is asked for, and the file of its study in the sweep's folder.

Imports Optuna only where a study is opened: a grid does without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robust_train.compat import importances_of
from robust_train.model.errors import ConfigError
from robust_train.sweep.record import STUDY_FILE

if TYPE_CHECKING:
    from optuna.storages import JournalStorage

STUDY = "sweep"
"""The name of the study."""


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


def importances_in(folder: Path) -> dict[str, float]:
    """Return the importance of each parameter of the study in ``folder``."""
    import optuna

    study = optuna.load_study(study_name=STUDY, storage=storage_in(folder))
    return importances_of(study)


def storage_in(folder: Path) -> JournalStorage:
    """Return the storage of the study in ``folder``. It takes no lock of its own: whoever writes is
    alone already, and Optuna's lock is broken after 30 s."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    class NoLock(JournalFileOpenLock):
        def acquire(self) -> bool:
            return True

        def release(self) -> None:
            pass

    path = str(folder / STUDY_FILE)
    return JournalStorage(JournalFileBackend(path, lock_obj=NoLock(path)))
