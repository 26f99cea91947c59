"""robust-train: one command trains on whatever GPU memory a shared machine has.

Importing this package imports neither torch nor Hydra; each name loads what it needs when used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from robust_train.cli.door import hydra_main
    from robust_train.errors import (
        AttemptsExhausted,
        ConfigError,
        Interrupted,
        JobInterrupted,
        NoDevice,
        NoProgress,
        TrainerFailed,
        UserError,
    )
    from robust_train.failures import classify_exit, classify_failure
    from robust_train.gpu.best import find_best_device
    from robust_train.launcher import launch
    from robust_train.memory import (
        GPUMemoryContext,
        cleanup_model_memory,
        clear_cuda_memory,
        clear_gpu_memory,
        enable_memory_efficient_settings,
        get_cuda_memory_info,
        get_gpu_memory_stats,
        log_gpu_memory_stats,
        print_cuda_memory_info,
        reset_peak_memory_stats,
        safe_tensor_to_cpu,
        save_checkpoint,
        set_memory_fraction,
    )
    from robust_train.microbatch.batcher import MicroBatcher
    from robust_train.microbatch.find_batch_size import find_batch_size
    from robust_train.microbatch.oom_handler import (
        OOMHandler,
        adaptive_batch_training,
        retry_on_oom,
    )
    from robust_train.microbatch.probing import FoundBatchSize
    from robust_train.planning.memory_plan import MemoryPlan, plan_memory
    from robust_train.run import Run
    from robust_train.runfolder.load_runs import load_runs
    from robust_train.runfolder.summary import Summary
    from robust_train.script.current_run import current_run
    from robust_train.values import Evidence, Failure, FailureKind

# fmt: off
__all__ = [
    "AttemptsExhausted", "ConfigError", "Evidence", "Failure", "FailureKind", "FoundBatchSize",
    "GPUMemoryContext", "Interrupted", "JobInterrupted", "MemoryPlan", "MicroBatcher", "NoDevice",
    "NoProgress", "OOMHandler", "Run", "Summary", "TrainerFailed", "UserError",
    "adaptive_batch_training", "classify_exit", "classify_failure", "cleanup_model_memory",
    "clear_cuda_memory", "clear_gpu_memory", "current_run", "enable_memory_efficient_settings",
    "find_batch_size", "find_best_device", "get_cuda_memory_info", "get_gpu_memory_stats",
    "hydra_main", "launch", "load_runs", "log_gpu_memory_stats", "plan_memory",
    "print_cuda_memory_info", "reset_peak_memory_stats", "retry_on_oom", "safe_tensor_to_cpu",
    "save_checkpoint", "set_memory_fraction",
]
# fmt: on

_NAMES = {
    "cli.door": "hydra_main",
    "errors": (
        "AttemptsExhausted ConfigError Interrupted JobInterrupted NoDevice NoProgress "
        "TrainerFailed UserError"
    ),
    "failures": "classify_exit classify_failure",
    "gpu.best": "find_best_device",
    "launcher": "launch",
    "memory": (
        "GPUMemoryContext cleanup_model_memory clear_cuda_memory clear_gpu_memory "
        "enable_memory_efficient_settings get_cuda_memory_info get_gpu_memory_stats "
        "log_gpu_memory_stats print_cuda_memory_info reset_peak_memory_stats safe_tensor_to_cpu "
        "save_checkpoint set_memory_fraction"
    ),
    "microbatch.batcher": "MicroBatcher",
    "microbatch.find_batch_size": "find_batch_size",
    "microbatch.oom_handler": "OOMHandler adaptive_batch_training retry_on_oom",
    "microbatch.probing": "FoundBatchSize",
    "planning.memory_plan": "MemoryPlan plan_memory",
    "run": "Run",
    "runfolder.load_runs": "load_runs",
    "runfolder.summary": "Summary",
    "script.current_run": "current_run",
    "values": "Evidence Failure FailureKind",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("robust-train")
    if name not in _HOMES:
        raise AttributeError(f"module 'robust_train' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"robust_train.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
