"""Private names of torch about CUDA: its context, its memory, and the version it was built for."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def when_cuda_starts(torch: Any, action: Callable[[], None]) -> None:
    """Call ``action`` when CUDA is initialised in this process, or now if it already is."""
    torch.cuda._lazy_call(action)


def has_context(torch: Any, index: int) -> bool:
    """Return whether this process has a CUDA context on a GPU, or True if torch does not know."""
    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return True if ask is None else bool(ask(index))


def set_allocator_settings(torch: Any, settings: str) -> None:
    """Apply settings to CUDA's caching allocator in this process.

    Raises:
        RuntimeError, ValueError: torch refuses them.
    """
    # torch 2.10 and later have it; before that the function is CUDA's own.
    apply = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (apply or torch._C._cuda_cudaCachingAllocator_set_allocator_settings)(settings)


def record_allocator_history(torch: Any, max_entries: int) -> None:
    """Record the origin of GPU allocations, for :func:`dump_allocator_snapshot`."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=max_entries)


def end_allocator_history(torch: Any) -> None:
    """Stop :func:`record_allocator_history`, and drop the records."""
    torch.cuda.memory._record_memory_history(enabled=None)


def allocator_history_is_recorded(torch: Any) -> bool:
    """Return whether torch records the origin of GPU allocations."""
    return bool(torch._C._cuda_isHistoryEnabled())


def dump_allocator_snapshot(torch: Any, path: str) -> None:
    """Write torch's memory snapshot, for the viewer at pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)


def clear_cublas_workspaces(torch: Any) -> None:
    """Return the workspaces of cuBLAS (up to 32 MiB per stream) to the caching allocator, if torch
    can do that. Never call it between replays of a CUDA graph, which contains the addresses of the
    workspaces (pytorch#193402)."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def return_pinned_memory(torch: Any) -> None:
    """Return unused pinned host memory to the system, if torch can do that. Otherwise torch's cache
    keeps it until the process ends."""
    empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()


def torch_cuda_version() -> str | None:
    """Return the CUDA version that torch was built for, ``none`` for a build without CUDA, or None
    if it is unknown. It is read from torch's ``version.py``, because importing torch takes
    seconds."""
    version = _version_in_torch("cuda")
    return None if version is None else version[1] or "none"


def torch_built_for(platform: str) -> str | None:
    """Return the version of ``hip`` or ``xpu`` that torch was built for, None if there is none."""
    version = _version_in_torch(platform)
    return None if version is None else version[1]


def _version_in_torch(platform: str) -> re.Match[str] | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    return re.search(rf"^{platform}\b.*= *(?:'([\d.]+)[^']*'|None)", text, re.M)
