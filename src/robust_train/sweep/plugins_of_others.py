"""Where sweepers and launchers of others need something said or done for them."""

from __future__ import annotations

import math
import traceback
from typing import Any

_OPTUNA_PLUGIN = "hydra_plugins.hydra_optuna_sweeper."


def no_objective(hydra: Any) -> float | None:
    """What a sweeper gets for a job that has no objective: NaN; from Optuna's plugin's jobs None.

    The plugin up to 1.3 ends the whole sweep at a NaN: it fails the trial and tells Optuna the
    value all the same, which Optuna refuses. What is no number at all it handles as meant, and so
    do its later releases: the trial has failed, and the search goes on.

    Args:
        hydra: the part ``hydra`` of the job's config.
    """
    sweeper = hydra.get("sweeper") or {}
    return None if str(sweeper.get("_target_")).startswith(_OPTUNA_PLUGIN) else math.nan


def known_problem(error: BaseException) -> str | None:
    """A line for what another's plugin raises where its user has to act, None for anything else."""
    functions = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    if isinstance(error, ValueError) and {"sweep", "best_trial"} <= functions:
        return "no job has completed, so there is no best one"
    if isinstance(error, RuntimeError) and 'Could not detect "srun"' in str(error):
        return (
            "hydra/launcher=submitit_slurm: no srun here; start the sweep where Slurm's commands "
            "are, or use hydra/launcher=gpu_queue on this machine"
        )
    return None
