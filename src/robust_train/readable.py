"""Figures as people read them."""

from __future__ import annotations


def as_clock(seconds: int) -> str:
    """Whole seconds as ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def ordinal(number: int) -> str:
    """``1st``, ``2nd``, ``3rd``, ``11th`` …"""
    last = 0 if 10 < number % 100 < 20 else number % 10
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(last, 'th') }"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, its type where it has none."""
    return (str(error).splitlines() or [""])[0] or type(error).__name__
