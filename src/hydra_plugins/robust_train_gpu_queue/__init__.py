"""Hydra finds this package by itself: ``hydra/launcher=gpu_queue``, and the sweepers of ours.

Imported at every start of any Hydra program, so the work is elsewhere. Annotations are no strings
here: Hydra runs this module before it is in ``sys.modules``, where dataclasses would look them up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class GpuQueueConf:
    """``hydra.launcher``."""

    _target_: str = "hydra_plugins.robust_train_gpu_queue.GpuQueueLauncher"
    # how many jobs run at once; null: as many as fit on the GPUs, or half the CPU cores
    n_jobs: int | None = None


class GpuQueueLauncher(Launcher):
    """Runs a sweep's jobs side by side; each waits for a GPU by itself."""

    def __init__(self, n_jobs: int | None = None) -> None:
        self._n_jobs = n_jobs

    def setup(
        self,
        *,
        hydra_context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
    ) -> None:
        """Take what Hydra gives once, before the first batch of jobs."""
        self._arguments = (hydra_context, task_function, config)
        if self._n_jobs is not None and self._n_jobs < 1:
            from robust_train.model.errors import ConfigError

            raise ConfigError(
                f"hydra.launcher.n_jobs={self._n_jobs}: must be 1 or more, or null to choose"
            )

    def launch(
        self,
        job_overrides: Sequence[Sequence[str]],
        initial_job_idx: int,
    ) -> Sequence[JobReturn]:
        """Run a sweeper's batch of jobs; return the results in order."""
        from robust_train.sweep.gpu_queue import GpuQueue

        queue = GpuQueue(*self._arguments, self._n_jobs)
        return queue.launch(job_overrides, initial_job_idx)


class RobustSweeper(Sweeper):
    """Starts a job whenever there is room for one; ``settings`` are those of ``hydra.sweeper``."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def setup(
        self,
        *,
        hydra_context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
    ) -> None:
        """Take what Hydra gives once."""
        self._arguments = (
            hydra_context,
            task_function,
            config,
            self._settings,
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the sweep that ``arguments`` describe."""
        from robust_train.sweep.sweeper import sweep

        sweep(*self._arguments, arguments)


ConfigStore.instance().store(
    group="hydra/launcher",
    name="gpu_queue",
    node=GpuQueueConf,
    provider="robust_train",
)

__all__ = ["GpuQueueLauncher", "RobustSweeper"]
