"""Figures as people read them."""

from __future__ import annotations

from robust_train.values import GIB, MIB

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def as_clock(seconds: int) -> str:
    """Return integer seconds as ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """Return ``0.4 s``, ``12 s``, ``3 min 5 s``, ``2 h 10 min``, ``3 d 4 h``."""
    if 0 < seconds < 0.05:
        return "< 0.1 s"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, name, smaller, smaller_name in (
        (_DAY, "d", _HOUR, "h"),
        (_HOUR, "h", _MINUTE, "min"),
        (_MINUTE, "min", 1, "s"),
    ):
        if whole >= size:
            count, rest = divmod(whole, size)
            part = rest // smaller
            return f"{count} {name} {part} {smaller_name}" if part else f"{count} {name}"
    return f"{whole} s"


def ordinal(number: int) -> str:
    """Return ``1st``, ``2nd``, ``3rd``, ``11th`` …"""
    last = 0 if 10 < number % 100 < 20 else number % 10
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(last, 'th') }"


def memory(size: float) -> str:
    """Return ``512 MiB``, ``15.8 GiB``: about how much it is."""
    if size >= 100 * GIB:
        return f"{size / GIB:.0f} GiB"
    if size >= GIB:
        return f"{size / GIB:.1f} GiB"
    if size >= 10 * MIB:
        return f"{size / MIB:.0f} MiB"
    return f"{size / MIB:.1f} MiB"


def mib(size_bytes: int) -> str:
    """Return ``15800 MiB``: to compare with a limit, or with what nvidia-smi shows."""
    return f"{size_bytes // MIB} MiB"
