"""The environment of an attempt: which GPU it sees, and how CUDA's allocator is set up."""

from __future__ import annotations

from collections.abc import Mapping

from robust_train.folder import trackers
from robust_train.gpu.visible import mask_for
from robust_train.memory.allocator import VARIABLE, allocator_settings
from robust_train.model.gpu import Group


def attempt_environment(
    environ: Mapping[str, str],  # the launcher's environment
    gpus: Group,  # the GPUs of the attempt, empty for the CPU
    *,
    expandable_segments: bool,  # for the allocator; what the user has exported takes precedence
    # number the GPUs, for programs that read integers; UUIDs otherwise, and where NVML and CUDA may
    # count differently
    by_index: bool = False,
) -> dict[str, str]:
    """Return the launcher's environment, with these GPUs (or none) visible."""
    return {
        **environ,
        "CUDA_VISIBLE_DEVICES": mask_for(gpus, by_index=by_index),
        # so that a program that prints or parses indices agrees with nvidia-smi
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        VARIABLE: allocator_settings(environ, expandable_segments=expandable_segments),
    }


# what an attempt can still change after libraries were imported, and what none of them reads
_NOT_READ_AT_IMPORT = (
    *("HYDRA_", "ROBUST_TRAIN_", "NCCL_", "TORCH_NCCL_", "TORCH_FR_", "CUBLAS_"),
    *("SLURM_", "SUBMITIT_"),
)
_SET_FOR_EACH_ATTEMPT = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "COLUMNS",
        "LINES",
        *trackers.VARIABLES,
    }
)
_ALLOCATORS = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
)


def read_at_import(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a library may read when it is imported. Of the allocator's settings
    that is only ``backend``."""
    read = {
        name: value
        for name, value in environ.items()
        if not name.startswith(_NOT_READ_AT_IMPORT)
        and name not in _SET_FOR_EACH_ATTEMPT
        and name not in _ALLOCATORS
    }
    for name in _ALLOCATORS:
        settings = environ.get(name, "").replace(" ", "").split(",")
        backend = next(
            (entry for entry in settings if entry.startswith("backend:")), None
        )
        if backend is not None:
            read[name] = backend
    return read
