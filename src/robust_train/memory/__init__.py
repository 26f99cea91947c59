"""Memory of this process: see it, clear it, limit it, and list what fills it.

Importing this package imports no torch; each name loads its module when it is used. Without CUDA
the functions act on the host's memory, and name it in what they return and log.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from robust_train.memory.clearing import (
        Cleared,
        cleanup_model_memory,
        clear_cuda_memory,
        clear_gpu_memory,
    )
    from robust_train.memory.cuda import (
        MemoryLimit,
        enable_memory_efficient_settings,
        set_memory_fraction,
    )
    from robust_train.memory.stats import (
        GPUMemoryContext,
        MemoryStats,
        get_cuda_memory_info,
        get_gpu_memory_stats,
        log_gpu_memory_stats,
        print_cuda_memory_info,
        reset_peak_memory_stats,
    )
    from robust_train.memory.tensors import largest_tensors, safe_tensor_to_cpu

# fmt: off
__all__ = [
    "Cleared", "GPUMemoryContext", "MemoryLimit", "MemoryStats", "cleanup_model_memory",
    "clear_cuda_memory", "clear_gpu_memory", "enable_memory_efficient_settings",
    "get_cuda_memory_info", "get_gpu_memory_stats", "largest_tensors", "log_gpu_memory_stats",
    "print_cuda_memory_info", "reset_peak_memory_stats", "safe_tensor_to_cpu",
    "set_memory_fraction",
]
# fmt: on

_HOMES = ("clearing", "cuda", "stats", "tensors")


def __getattr__(name: str) -> object:
    if name in __all__:
        for home in _HOMES:
            module = importlib.import_module(f"robust_train.memory.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module 'robust_train.memory' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
