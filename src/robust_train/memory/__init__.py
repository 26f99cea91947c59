"""Shows, clears and limits the memory of this process, and lists its largest tensors.

Users import these functions in a process of their own; the command ``memory`` runs them, too.
Importing this package does not import torch: each name loads its module on first use. Without CUDA
the functions act on the host's memory, and their results and log lines say so.
"""

from __future__ import annotations

import importlib
from typing import Any

# The public names of each module, separated by spaces.
_NAMES_OF_MODULES = {
    "robust_train.folder.checkpoint_writing": "save_checkpoint",
    "robust_train.memory.clearing": (
        "Cleared cleanup_model_memory clear_cuda_memory clear_gpu_memory"
    ),
    "robust_train.memory.limits": (
        "MemoryLimit enable_memory_efficient_settings set_memory_fraction"
    ),
    "robust_train.memory.peaks": "GPUMemoryContext reset_peak_memory_stats",
    "robust_train.memory.stats": (
        "MemoryStats get_cuda_memory_info get_gpu_memory_stats log_gpu_memory_stats "
        "print_cuda_memory_info"
    ),
    "robust_train.memory.tensors": "largest_tensors safe_tensor_to_cpu",
}
_MODULE_OF_NAME = {
    name: module for module, names in _NAMES_OF_MODULES.items() for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF_NAME[name]), name)


def __dir__() -> list[str]:
    return sorted(_MODULE_OF_NAME)
