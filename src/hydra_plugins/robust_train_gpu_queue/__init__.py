"""Hydra finds this package by itself: our launchers, sweepers, samplers and pruners, by name.

Imported at every start of any Hydra program, so the work is elsewhere. Every Hydra program of the
environment shares these names, so no other plugin may have them. Annotations are no strings here:
Hydra runs this module before it is in ``sys.modules``, where dataclasses would look them up.
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
        self._arguments: tuple[HydraContext, TaskFunction, DictConfig]

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take what Hydra gives once, before the first batch of jobs."""
        self._arguments = (hydra_context, task_function, config)
        if self._n_jobs is not None and self._n_jobs < 1:
            from robust_train.model.errors import ConfigError

            raise ConfigError(
                f"hydra.launcher.n_jobs={self._n_jobs}: must be 1 or more, or null to choose"
            )

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run a sweeper's batch of jobs; return the results in order."""
        from robust_train.sweep.gpu_queue import GpuQueue

        queue = GpuQueue(*self._arguments, self._n_jobs)
        return queue.launch(job_overrides, initial_job_idx)


class RobustSweeper(Sweeper):
    """Starts a job whenever there is room for one; ``settings`` are those of ``hydra.sweeper``."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._arguments: tuple[HydraContext, TaskFunction, DictConfig, dict[str, Any]]

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take what Hydra gives once."""
        self._arguments = (hydra_context, task_function, config, self._settings)

    def sweep(self, arguments: list[str]) -> None:
        """Run the sweep that ``arguments`` describe."""
        from robust_train.sweep.sweeper import sweep

        sweep(*self._arguments, arguments)


# Slurm by way of submitit: a job that is preempted, or whose time is up, is queued again and goes
# on from its checkpoint. Needs the extra [slurm].
ROBUST_SLURM = {
    "defaults": ["submitit_slurm", "_self_"],
    "gpus_per_node": "${oc.select:robust.num_gpus,${oc.select:num_gpus,1}}",
    "cpus_per_task": 4,
    "timeout_min": 240,
    # time for the last checkpoint before the time is up
    "signal_delay_s": 120,
    # times that a job whose time is up is queued again
    "max_num_timeout": 100,
}

# Ray: each job asks for one GPU of the cluster and stays inside it. Needs the extra [ray].
ROBUST_RAY = {
    "defaults": ["ray", "_self_"],
    "ray": {
        "remote": {
            # 0.5: two jobs share a GPU; 0 for jobs on the CPU
            "num_gpus": 1,
            "num_cpus": 1,
            # a process for each job, so that nothing of one is left for the next
            "max_calls": 1,
        }
    },
}

_SWEEPER = {
    "_target_": "hydra_plugins.robust_train_gpu_queue.RobustSweeper",
    "_recursive_": False,
    # how many jobs run at once; None: as many as fit on the GPUs, or half the CPU cores
    "n_jobs": None,
    # how often each combination runs, with a seed of its own
    "repeat": 1,
    "seed_key": "seed",
    # maximize or minimize; None: as sweep_direction says
    "direction": None,
    "params": None,
}

# Every combination of the values, each as soon as there is room for it.
ROBUST_GRID = _SWEEPER

# Optuna says what to try next, each time there is room for a job. Needs the extra [sweep].
ROBUST_OPTUNA = {
    "defaults": ["_self_", {"sampler": "robust_tpe"}, {"pruner": None}],
    **_SWEEPER,
    # in all, those of earlier launches in the same folder included
    "n_trials": 20,
    # or robust_median, robust_successive_halving
    "pruner": None,
}

ROBUST_RANDOM = {"_target_": "optuna.samplers.RandomSampler", "seed": None}

ROBUST_TPE = {
    "_target_": "optuna.samplers.TPESampler",
    "seed": None,
    "n_startup_trials": 10,
    # keep away from what is running
    "constant_liar": True,
}

# Stops a trial that is worse than the median of the others at the same step.
ROBUST_MEDIAN = {
    "_target_": "optuna.pruners.MedianPruner",
    # trials that run to their end first
    "n_startup_trials": 5,
    # steps before which no trial is pruned
    "n_warmup_steps": 0,
}

# Lets the best third of the trials that have come as far continue (ASHA); none waits for others.
ROBUST_SUCCESSIVE_HALVING = {
    "_target_": "optuna.pruners.SuccessiveHalvingPruner",
    "min_resource": "auto",
    "reduction_factor": 3,
}

_BY_GROUP: dict[str, dict[str, Any]] = {
    "hydra/launcher": {
        "gpu_queue": GpuQueueConf,
        "robust_slurm": ROBUST_SLURM,
        "robust_ray": ROBUST_RAY,
    },
    "hydra/sweeper": {"robust_grid": ROBUST_GRID, "robust_optuna": ROBUST_OPTUNA},
    "hydra/sweeper/sampler": {"robust_random": ROBUST_RANDOM, "robust_tpe": ROBUST_TPE},
    "hydra/sweeper/pruner": {
        "robust_median": ROBUST_MEDIAN,
        "robust_successive_halving": ROBUST_SUCCESSIVE_HALVING,
    },
}

for _group, _nodes in _BY_GROUP.items():
    for _name, _node in _nodes.items():
        ConfigStore.instance().store(group=_group, name=_name, node=_node, provider="robust_train")

__all__ = ["GpuQueueLauncher", "RobustSweeper"]
