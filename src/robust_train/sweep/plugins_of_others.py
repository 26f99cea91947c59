"""What the launchers and sweepers of other projects need from us."""

from __future__ import annotations

import json
from collections.abc import MutableMapping

from hydra.types import RunMode
from omegaconf import DictConfig

from robust_train.model.errors import EXIT_BAD_CONFIG, EXIT_FAILED

_OWN_MASK = "ROBUST_TRAIN_SWEEP_MASK"
_MASK = "CUDA_VISIBLE_DEVICES"


def known_problem(error: BaseException) -> tuple[str, int] | None:
    """Return one line and an exit code for a plugin's error that its user can mend, else None."""
    if isinstance(error, RuntimeError) and 'Could not detect "srun"' in str(error):
        return (
            "hydra/launcher=submitit_slurm: no srun here; start the sweep where Slurm's commands "
            "are, or use hydra/launcher=gpu_queue on this machine",
            EXIT_BAD_CONFIG,
        )
    # of submitit; the table has the reason
    if type(error).__name__ == "UncompletedJobError":
        return " ".join(str(error).splitlines()[:2]), EXIT_FAILED
    return None


def remember_mask(environ: MutableMapping[str, str]) -> None:
    """Keep the user's CUDA_VISIBLE_DEVICES for :func:`restore_mask` in the jobs."""
    environ[_OWN_MASK] = json.dumps(environ.get(_MASK))


def restore_mask(environ: MutableMapping[str, str]) -> None:
    """Restore the user's CUDA_VISIBLE_DEVICES, which submitit's local executor overwrites."""
    if environ.get("SUBMITIT_EXECUTOR") == "local" and _OWN_MASK in environ:
        environ.pop(_MASK, None)
        if (mask := json.loads(environ[_OWN_MASK])) is not None:
            environ[_MASK] = mask


def misplaced_launcher(config: DictConfig, running: str | None) -> str | None:
    """Return one line for a launcher in a job's config that Hydra silently ignores; None if it
    counts. ``running``: the one that runs the sweep; None if unknown."""
    chosen = str(config.hydra.runtime.choices.get("hydra/launcher"))
    if config.hydra.mode != RunMode.MULTIRUN:
        if (
            chosen == "basic"
            or f"hydra/launcher={chosen}" not in config.hydra.overrides.hydra
        ):
            return None
        return (
            f"hydra/launcher={chosen}: a launcher runs the jobs of a sweep, and this is none; "
            "add -m"
        )
    if running in (None, chosen):
        return None
    # hydra#2946: a file that the sweep varies is read per job, long after the launcher was chosen
    return (
        f"hydra/launcher: {chosen}: chosen in a file that the sweep itself selects, which is too "
        f"late ({running} is running it already); put hydra/launcher={chosen} on the command line"
    )
