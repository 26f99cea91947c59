"""Estimates the GPU memory of a process: its tensors, the allocator's cache and its CUDA context.

The queue compares the estimate with a GPU's free memory before a job starts. The size of a context
depends on the GPU's model, so attempts measure theirs, and a file in the user's cache remembers it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from robust_train.files import read_object, write_json
from robust_train.readable import GIB, MIB

CONTEXT_BYTES = 512 * MIB
"""The assumed size of a CUDA context with its kernels, until it is measured. NVML counts it in
addition to torch's cache."""

CACHE_FACTOR = 1.1
"""The bytes that torch's caching allocator holds per byte of tensors at their peak. It requests at
least 2 MiB or 20 MiB from the driver (``kSmallBuffer``, ``kLargeBuffer`` in
CUDACachingAllocator.h), and keeps the gaps between tensors. With expandable segments the factor is
usually smaller."""

# Other sizes are measuring errors.
_PLAUSIBLE = range(64 * MIB, 8 * GIB)
_PLAUSIBLE_AT_MOST = range(128 * MIB, 2 * GIB)
# The ending of a model's name in the file, for an upper bound.
_AT_MOST = " at most"


def estimate_footprint(allocated_bytes: int, gpu_name: str = "") -> int:
    """Return the memory that NVML would show for a process.

    Args:
        allocated_bytes: the peak of the process's tensors.
        gpu_name: the GPU's model, on which earlier jobs may have measured their contexts.
    """
    context_bytes = learned_context_bytes(gpu_name) or CONTEXT_BYTES
    return int(allocated_bytes * CACHE_FACTOR) + context_bytes


def learned_context_bytes(gpu_name: str) -> int:
    """Return the largest context of this user's jobs on GPUs of this model, 0 if unknown. If no
    context was measured because NVML lists no processes, return the smallest upper bound."""
    contexts = _read_contexts()
    measured = contexts.get(gpu_name)
    return measured if measured else contexts.get(gpu_name + _AT_MOST, 0)


def learn_context_bytes(gpu_name: str, figures: Mapping[str, int]) -> None:
    """Remember the size of the context that an attempt measured. Never raises, because without the
    file only an assumption is used.

    Args:
        gpu_name: the GPU's model.
        figures: the attempt's memory figures.
    """
    contexts = _read_contexts()
    measured = figures.get("context_bytes", 0)
    at_most = figures.get("context_at_most_bytes", 0)
    name = gpu_name + _AT_MOST
    learned = dict(contexts)
    if measured in _PLAUSIBLE:
        learned[gpu_name] = max(measured, contexts.get(gpu_name, 0))
    if at_most in _PLAUSIBLE_AT_MOST:
        # Memory of other processes only raises an upper bound, so the smallest bound is kept.
        learned[name] = min(at_most, contexts.get(name, at_most))
    path = _contexts_file()
    if learned != contexts and path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(path, learned, indent=2)


def _contexts_file() -> Path | None:
    """Return the file that remembers contexts, None if the user has no home folder."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    home = os.environ.get("HOME", "")
    # The XDG Base Directory Specification says to ignore relative paths.
    cache = chosen if os.path.isabs(chosen) else os.path.join(home, ".cache")
    path = Path(cache) / "robust-train/contexts.json"
    return path if path.is_absolute() else None


def _read_contexts() -> dict[str, int]:
    path = _contexts_file()
    contexts = {} if path is None else read_object(path)
    return {
        name: size for name, size in contexts.items() if type(size) is int and size in _PLAUSIBLE
    }
