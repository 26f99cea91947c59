"""What a process takes of a GPU beside its tensors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from robust_train.files import read_object, write_json
from robust_train.readable import GIB, MIB

CONTEXT_BYTES = 512 * MIB
"""A CUDA context with its kernels, which NVML shows beside torch's cache, until it was measured."""

CACHE_FACTOR = 1.1
"""Bytes that the caching allocator holds for each that tensors take at their peak: it asks the
driver for 2 MiB or 20 MiB at least (``kSmallBuffer``, ``kLargeBuffer`` in CUDACachingAllocator.h)
and keeps what lies between tensors. With expandable segments it is mostly less."""

_PLAUSIBLE = range(64 * MIB, 8 * GIB)
_PLAUSIBLE_AT_MOST = range(128 * MIB, 2 * GIB)
_AT_MOST = " at most"


def footprint(allocated_bytes: int, gpu_name: str = "") -> int:
    """Return what NVML shows for a process whose tensors take ``allocated_bytes`` at their peak.
    ``gpu_name`` is the GPU's model, where earlier jobs have measured their contexts."""
    context_bytes = learned_context_bytes(gpu_name) or CONTEXT_BYTES
    return int(allocated_bytes * CACHE_FACTOR) + context_bytes


def learned_context_bytes(gpu_name: str) -> int | None:
    """Return the largest context of this user's jobs on GPUs of this model, if known; where NVML
    lists no processes, the smallest that it is at most."""
    known = _read()
    return known.get(gpu_name) or known.get(gpu_name + _AT_MOST)


def learn_context_bytes(gpu_name: str, figures: Mapping[str, int]) -> None:
    """Remember what an attempt measured. Never raises: a guess is all that is lost."""
    known, measured = _read(), figures.get("context_bytes", 0)
    at_most, name = figures.get("context_at_most_bytes", 0), gpu_name + _AT_MOST
    learned = dict(known)
    if measured in _PLAUSIBLE:
        learned[gpu_name] = max(measured, known.get(gpu_name, 0))
    if at_most in _PLAUSIBLE_AT_MOST:  # others' memory only adds
        learned[name] = min(at_most, known.get(name, at_most))
    path = _file()
    if learned != known and path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(path, learned, indent=2)


def user_cache(environ: Mapping[str, str]) -> Path | None:
    """Return ``$XDG_CACHE_HOME/robust-train``; None without a home."""
    chosen, home = environ.get("XDG_CACHE_HOME", ""), environ.get("HOME", "")
    # the XDG Base Directory Specification ignores relative paths
    if os.path.isabs(chosen):
        return Path(chosen) / "robust-train"
    return Path(home) / ".cache/robust-train" if os.path.isabs(home) else None


def _read() -> dict[str, int]:
    path = _file()
    known = {} if path is None else read_object(path)
    return {
        name: size
        for name, size in known.items()
        if type(size) is int and size in _PLAUSIBLE
    }


def _file() -> Path | None:
    cache = user_cache(os.environ)
    return None if cache is None else cache / "contexts.json"
