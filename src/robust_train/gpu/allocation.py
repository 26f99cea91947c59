"""GPUs that a cluster's scheduler has given to this job already."""

from __future__ import annotations

from collections.abc import Mapping

_SLURM_GPUS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE")


def allocated_by(environ: Mapping[str, str]) -> str | None:
    """Return who has allocated the GPUs of a process with this environment: ``Slurm`` or ``Ray``.
    Their allocation is a reservation already. A Slurm without GPUs in its configuration and a Ray
    task that asked for none reserve nothing, although they see every GPU of the host."""
    if "SLURM_JOB_ID" in environ and any(environ.get(name) for name in _SLURM_GPUS):
        return "Slurm"
    if "RAY_RAYLET_PID" in environ and environ.get("CUDA_VISIBLE_DEVICES"):
        return "Ray"
    return None
