"""Figures for people."""

from __future__ import annotations

import datetime
import math

from robust_train import readable
from robust_train.values import GIB, MIB

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")


def duration(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3 min 5 s``, ``2 h 10 min``, ``3 d 4 h``."""
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


def memory(size: float) -> str:
    """``512 MiB``, ``15.8 GiB``."""
    if size >= 100 * GIB:
        return f"{size / GIB:.0f} GiB"
    if size >= GIB:
        return f"{size / GIB:.1f} GiB"
    if size >= 10 * MIB:
        return f"{size / MIB:.0f} MiB"
    return f"{size / MIB:.1f} MiB"


def number(value: float) -> str:
    """Four figures at most, without needless zeros."""
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        mantissa, _, exponent = f"{value:.3g}".partition("e")
        return f"{mantissa}e{int(exponent)}" if exponent else mantissa
    return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def percent(share: float) -> str:
    """A share of 0 to 1. Only all is 100 %, only nothing is 0 %."""
    if 0 < share < 0.01:
        return "< 1 %"
    if 0.99 < share < 1:
        return "> 99 %"
    return f"{100 * share:.0f} %"


def ordinal(count: int) -> str:
    """``first``, ``12th``."""
    if 1 <= count <= len(_ORDINALS):
        return _ORDINALS[count - 1]
    return readable.ordinal(count)


def moment(time: float) -> str:
    """Date and time of day with the zone of whoever makes the report."""
    try:
        at = datetime.datetime.fromtimestamp(time).astimezone()
    except (OverflowError, OSError, ValueError):
        return "?"
    return at.strftime("%Y-%m-%d %H:%M:%S %Z").strip()


def nice_step(span: float, most: int) -> float:
    """The smallest of 1, 2, 5, 10, 20 … that cuts ``span`` into at most ``most`` pieces."""
    if not (span > 0 and math.isfinite(span)):
        return 1.0
    rough = span / most
    scale = 10.0 ** math.floor(math.log10(rough))
    return next((m * scale for m in (1, 2, 5) if m * scale >= rough * (1 - 1e-9)), 10 * scale)
