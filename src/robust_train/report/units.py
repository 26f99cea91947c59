"""Figures for people."""

from __future__ import annotations

import datetime
import math

from robust_train import readable
from robust_train.readable import duration as duration
from robust_train.readable import memory as memory

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")


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
