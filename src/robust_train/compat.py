"""Private symbols of other libraries, each in one place with a test in ``tests/test_compat.py``.

Nothing is imported before a function needs it. A symbol that a version lacks costs a feature, never
a job: each function says what it returns then.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any


def preserve_version_counter(tensor: Any) -> AbstractContextManager[None]:
    """Let changes of ``tensor`` within the block go unseen by autograd's version counter."""
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter

    return _unsafe_preserve_version_counter(tensor)


def autograd_sequence_number() -> int | None:
    """Return the number that autograd gives this thread's next operation; None if not available."""
    get = getattr(sys.modules["torch"]._C._autograd, "_get_sequence_nr", None)
    return None if get is None else int(get())


def clear_cublas_workspaces() -> None:
    """Return cuBLAS's workspaces (up to 32 MiB a stream) to the caching allocator, if possible.

    Never between replays of a CUDA graph, which embeds their addresses (pytorch#193402).
    """
    clear = getattr(sys.modules["torch"]._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def has_context(index: int) -> bool:
    """Return whether this process has a CUDA context on a GPU; True where torch cannot tell."""
    ask = getattr(sys.modules["torch"]._C, "_cuda_hasPrimaryContext", None)
    return True if ask is None else bool(ask(index))


def set_allocator_settings(settings: str) -> None:
    """Apply settings to CUDA's caching allocator in this process.

    Raises:
        RuntimeError, ValueError: torch refuses them.
    """
    c = sys.modules["torch"]._C
    # torch 2.10 and later; before that the function of CUDA's own
    apply = getattr(c, "_accelerator_setAllocatorSettings", None)
    (apply or c._cuda_cudaCachingAllocator_set_allocator_settings)(settings)


def allocator_history_is_recorded() -> bool:
    """Return whether torch records where GPU memory is allocated from."""
    return bool(sys.modules["torch"]._C._cuda_isHistoryEnabled())


def record_allocator_history(max_entries: int) -> None:
    """Record where GPU memory is allocated from, for :func:`dump_allocator_snapshot`."""
    record = sys.modules["torch"].cuda.memory._record_memory_history
    record(stacks="python", max_entries=max_entries)


def dump_allocator_snapshot(path: str) -> None:
    """Write torch's memory snapshot, for the viewer at pytorch.org/memory_viz."""
    sys.modules["torch"].cuda.memory._dump_snapshot(path)


def when_cuda_starts(call: Any) -> None:
    """Run ``call`` as soon as torch starts CUDA; at once if it has."""
    sys.modules["torch"].cuda._lazy_call(call)
