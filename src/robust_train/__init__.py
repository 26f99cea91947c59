"""robust-train: one command trains on whatever GPU memory a shared machine has.

This file is the public API. Importing it imports neither torch nor Hydra: each name imports its
module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from robust_train.host.loggers import take_loggers

if TYPE_CHECKING:
    from robust_train.attempt.run import Run
    from robust_train.attempt.script.script_run import ScriptRun, current_run
    from robust_train.cli.train import hydra_main
    from robust_train.entry import launch
    from robust_train.failures import classify_failure
    from robust_train.folder.checkpoint_writing import CheckpointError, save_checkpoint
    from robust_train.folder.state import Summary
    from robust_train.gpu.select import find_best_device
    from robust_train.memory.clearing import (
        Cleared,
        cleanup_model_memory,
        clear_cuda_memory,
        clear_gpu_memory,
    )
    from robust_train.memory.limits import (
        MemoryLimit,
        enable_memory_efficient_settings,
        set_memory_fraction,
    )
    from robust_train.memory.peaks import GPUMemoryContext, reset_peak_memory_stats
    from robust_train.memory.stats import (
        MemoryStats,
        get_cuda_memory_info,
        get_gpu_memory_stats,
        log_gpu_memory_stats,
        print_cuda_memory_info,
    )
    from robust_train.memory.tensors import safe_tensor_to_cpu
    from robust_train.model.errors import (
        AttemptsExhaustedError,
        ConfigError,
        JobInterrupted,
        NoDeviceError,
        NoProgressError,
        RankFailure,
        RunFolderUnavailableError,
        TrainerFailedError,
        TrainingDiverged,
        TrainingStopped,
        UserError,
    )
    from robust_train.model.failure import Evidence, Failure, FailureKind
    from robust_train.step.batcher import MicroBatcher
    from robust_train.step.oom_handler import OOMHandler, adaptive_batch_training, retry_on_oom
    from robust_train.step.probing import FoundBatchSize, find_batch_size
    from robust_train.step.split_check import SplitCheck
    from robust_train.step.split_checker import check_split

take_loggers()

# fmt: off
__all__ = [
    "AttemptsExhaustedError", "CheckpointError", "Cleared", "ConfigError", "Evidence", "Failure",
    "FailureKind", "FoundBatchSize", "GPUMemoryContext", "JobInterrupted", "MemoryLimit",
    "MemoryStats", "MicroBatcher", "NoDeviceError", "NoProgressError", "OOMHandler", "RankFailure",
    "Run", "RunFolderUnavailableError", "ScriptRun", "SplitCheck", "Summary", "TrainerFailedError",
    "TrainingDiverged", "TrainingStopped", "UserError",
    "adaptive_batch_training", "check_split", "classify_failure",
    "cleanup_model_memory", "clear_cuda_memory", "clear_gpu_memory", "current_run",
    "enable_memory_efficient_settings",
    "find_batch_size", "find_best_device", "get_cuda_memory_info", "get_gpu_memory_stats",
    "hydra_main", "launch", "log_gpu_memory_stats",
    "print_cuda_memory_info", "reset_peak_memory_stats", "retry_on_oom", "safe_tensor_to_cpu",
    "save_checkpoint", "set_memory_fraction",
]
# fmt: on

# The public names of each module.
_NAMES = {
    "cli.train": "hydra_main",
    "model.errors": (
        "AttemptsExhaustedError ConfigError JobInterrupted NoDeviceError NoProgressError "
        "RankFailure RunFolderUnavailableError TrainerFailedError TrainingDiverged "
        "TrainingStopped UserError"
    ),
    "failures": "classify_failure",
    "gpu.select": "find_best_device",
    "entry": "launch",
    "memory.clearing": "Cleared cleanup_model_memory clear_cuda_memory clear_gpu_memory",
    "memory.limits": "MemoryLimit enable_memory_efficient_settings set_memory_fraction",
    "memory.peaks": "GPUMemoryContext reset_peak_memory_stats",
    "memory.stats": (
        "MemoryStats get_cuda_memory_info get_gpu_memory_stats log_gpu_memory_stats "
        "print_cuda_memory_info"
    ),
    "memory.tensors": "safe_tensor_to_cpu",
    "step.batcher": "MicroBatcher",
    "step.oom_handler": "OOMHandler adaptive_batch_training retry_on_oom",
    "step.probing": "FoundBatchSize find_batch_size",
    "step.split_check": "SplitCheck",
    "step.split_checker": "check_split",
    "attempt.run": "Run",
    "folder.checkpoint_writing": "CheckpointError save_checkpoint",
    "folder.state": "Summary",
    "attempt.script.script_run": "ScriptRun current_run",
    "model.failure": "Evidence Failure FailureKind",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("robust-train")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'robust_train' has no attribute {name!r}")
    module = importlib.import_module(f"robust_train.{_MODULE_OF[name]}")
    value = getattr(module, name)
    # Python does not call this function for the name again.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
