"""The figures of a failure, in bytes: from the message, and from torch's statistics."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import Any

from robust_train.failures.patterns import Match
from robust_train.model.failure import Evidence, FailureKind

# torch's and MPS's "MB" are 1024 based too; XLA's letters stand alone ("5.02G")
_UNITS = {
    "": 1,
    "k": 1024,
    "m": 1024**2,
    "g": 1024**3,
    "t": 1024**4,
    "p": 1024**5,
    "e": 1024**6,
}
_SIZE = r"(?P<number>\d[\d,]*(?:\.\d*)?)\s*(?P<unit>[kmgtpe]i?b?|bytes?|b)\b"
_BYTES = r"(?P<number>\d+)(?P<unit>)"


def _table(*patterns: str) -> tuple[re.Pattern[str], ...]:
    return tuple(
        re.compile(p.replace("SIZE", _SIZE).replace("COUNT", _BYTES), re.IGNORECASE)
        for p in patterns
    )


_REQUESTED = _table(
    r"(?:allocate|alloc|allocating|reserve|mmap) [\d.]+\s?[KMGTP]i?B?\b \(COUNT ?b(?:ytes)?\)",
    r"(?:allocate|alloc|allocating|allocation of|reserve|mmap) (?:request for |more than )?SIZE",
    r"failed to allocate request for [\d.]+\w+ \(COUNTB\)",
    r"Trying to allocate COUNT",  # c10's mobile allocator gives no unit
    r"(?:malloc|realloc|buffer|memory|block) of size:? COUNT",
    r"Requested (?:size|memory):? (?:SIZE|(?P<plain>\d+))",
    r"Requested\s+: SIZE",  # with backend:cudaMallocAsync, limit or not
    r"requested bytes of COUNT",
    r"Invalid buffer size: SIZE",
    r"Cannot allocate SIZE memory",
)
_ALLOCATED = _table(
    r"SIZE already allocated",
    r"Of the allocated memory SIZE is allocated by",
    r"MPS allocated: SIZE",
    r"allocated so far: SIZE",
    r"SIZE memory has been allocated",
    r"of which SIZE is allocated by",
)
_UNUSED = _table(
    r"SIZE is reserved by \w+ but unallocated",
    r"SIZE cached",  # until torch 1.3: cached minus allocated
)
_RESERVED = _table(r"SIZE reserved in total")
_FREE = _table(
    r"of which SIZE is free",
    r"Free \(according to CUDA\): SIZE",
    r"SIZE free\b",
    r"available memory is only SIZE",
    r"Free memory: (?:SIZE|(?P<plain>\d+))",
    r"Available memory of COUNT is smaller",
)
_ALLOWED = _table(r"SIZE allowed;")
_PREEMPTIVE = re.compile(r"preemptively rejected", re.IGNORECASE)
_TOTAL = _table(
    r"SIZE total capacity", r"total capaci?ty of SIZE", r"max allowed: SIZE"
)

# whose allocator's statistics are those of torch
_TORCH = frozenset(
    {"torch", "cuda", "hip", "cublas", "cudnn", "cufft", "cusolver", "nccl", None}
)


def read_evidence(text: str, match: Match) -> Evidence:
    """Return the figures in a message; ``text`` is on one line. torch asks the driver only below
    ``memory.fraction``: if more was free than was requested, or it rejects "preemptively" (since
    2.15), the process reached its own limit."""
    requested = _first(_REQUESTED, text)
    allocated = _first(_ALLOCATED, text)
    unused = _first(_UNUSED, text)
    reserved = _first(_RESERVED, text)
    if unused is None and reserved is not None and allocated is not None:
        unused = max(0, reserved - allocated)
    free, allowed = _first(_FREE, text), _first(_ALLOWED, text)
    had_room = requested is not None and free is not None and free >= requested
    is_device = match.kind is FailureKind.DEVICE_OOM and match.library == "torch"
    return Evidence(
        requested_bytes=requested,
        allocated_bytes=allocated,
        reserved_unallocated_bytes=unused,
        free_bytes=free,
        total_bytes=_first(_TOTAL, text),
        allowed_bytes=allowed,
        fragmented=_is_fragmented(requested, unused),
        own_limit=is_device and (had_room or _PREEMPTIVE.search(text) is not None),
        clue=match.clue,
        library=match.library,
    )


def with_statistics(evidence: Evidence, text: str) -> Evidence:
    """Fill in from torch what the message left out, if torch is loaded and has started CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or evidence.library not in _TORCH:
        return evidence
    try:
        if not torch.cuda.is_initialized():
            return evidence
        figures = _statistics(torch, text)
    except Exception:  # a broken driver must not hide what broke it
        return evidence
    missing: dict[str, Any] = {
        name: value
        for name, value in figures.items()
        if getattr(evidence, name) is None
    }
    filled = replace(evidence, **missing)
    return replace(
        filled,
        fragmented=_is_fragmented(
            filled.requested_bytes, filled.reserved_unallocated_bytes
        ),
    )


def _statistics(torch: Any, text: str) -> dict[str, int]:
    named = re.search(r"\bGPU (\d+)", text)
    count = torch.cuda.device_count()
    device = int(named.group(1)) if named and int(named.group(1)) < count else None
    allocated = torch.cuda.memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated_bytes": allocated,
        "reserved_unallocated_bytes": max(
            0, torch.cuda.memory_reserved(device) - allocated
        ),
        "free_bytes": free,
        "total_bytes": total,
    }


def _is_fragmented(requested: int | None, unused: int | None) -> bool:
    return (
        bool(requested)
        and unused is not None
        and requested is not None
        and unused >= requested
    )


def _first(patterns: tuple[re.Pattern[str], ...], text: str) -> int | None:
    for pattern in patterns:
        match = pattern.search(text)
        if match is not None:
            return _bytes(match)
    return None


def _bytes(match: re.Match[str]) -> int | None:
    groups = match.groupdict()
    number = groups.get("number") or groups.get("plain") or ""
    unit = (groups.get("unit") or "").lower()
    factor = 1 if unit.startswith("b") else _UNITS[unit[:1]]
    try:
        return int(float(number.replace(",", "")) * factor)
    except (ValueError, OverflowError):
        return None
