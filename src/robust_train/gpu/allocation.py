"""GPUs that a cluster's scheduler has given to this job already."""

from __future__ import annotations

from collections.abc import Mapping

_SLURM_GPUS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE")


def allocated_by(environ: Mapping[str, str]) -> str | None:
    """Who has allocated the GPUs that this process may use: ``Slurm``, ``Ray`` or None.

    Their allocation is a reservation among all of the cluster's jobs, so the host's own queue has
    nothing to add. Slurm without GPUs in its configuration, and a Ray task that asked for none,
    see every GPU of the host and have none of them reserved: that is nobody's allocation.

    Args:
        environ: the process's environment. Slurm's variables are those of sbatch(1) and srun(1);
            Ray sets ``RAY_RAYLET_PID`` in its workers and ``CUDA_VISIBLE_DEVICES`` for a task's
            share of GPUs.
    """
    if "SLURM_JOB_ID" in environ and any(environ.get(name) for name in _SLURM_GPUS):
        return "Slurm"
    if "RAY_RAYLET_PID" in environ and environ.get("CUDA_VISIBLE_DEVICES"):
        return "Ray"
    return None
