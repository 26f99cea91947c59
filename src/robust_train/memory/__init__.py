"""Memory of this process: see it, clear it, limit it, and list what fills it.

Importing this package does not import torch. Each name loads its module on first use. Without CUDA
the functions act on the host's memory, and name it in what they return and log.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "robust_train.folder.checkpoints": "save_checkpoint",
    "robust_train.memory.clearing": (
        "Cleared cleanup_model_memory clear_cuda_memory clear_gpu_memory"
    ),
    "robust_train.memory.cuda": (
        "MemoryLimit enable_memory_efficient_settings set_memory_fraction"
    ),
    "robust_train.memory.stats": (
        "GPUMemoryContext MemoryStats get_cuda_memory_info get_gpu_memory_stats "
        "log_gpu_memory_stats print_cuda_memory_info reset_peak_memory_stats"
    ),
    "robust_train.memory.tensors": "largest_tensors safe_tensor_to_cpu",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
