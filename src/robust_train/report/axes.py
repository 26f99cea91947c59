"""From values to pixels: scales, ticks, and lines thinned to what a picture can show. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from robust_train.readable import duration, number
from robust_train.values import GIB, MIB

Point = tuple[float, float]

_TIME_STEPS = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200),
)
_DAY = 86400.0
_MOST_DECADES = 12


@dataclass(frozen=True)
class Scale:
    """Maps ``low`` … ``high`` to the pixels ``start`` … ``stop``.

    Attributes:
        low, high: values; a range without extent is widened.
        start, stop: pixels.
        is_log: equal ratios are equal distances; both values must then be positive.
    """

    low: float
    high: float
    start: float
    stop: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        return self.many([value])[0]

    def many(self, values: Iterable[float]) -> list[float]:
        """Return the pixels of values."""
        low, high = self.low, self.high
        if self.is_log:
            values = [math.log10(max(value, low)) for value in values]
            low, high = math.log10(low), math.log10(high)
        factor = 0.0 if high == low else (self.stop - self.start) / (high - low)
        return [self.start + factor * (value - low) for value in values]


@dataclass(frozen=True)
class Tick:
    """A labelled position on an axis."""

    value: float
    text: str


def time_ticks(high: float, most: int) -> list[Tick]:
    """Return ticks from 0 to ``high`` seconds."""
    fitting = (step for step in _TIME_STEPS if high / step <= most)
    step = next(fitting, None) or nice_step(high / _DAY, most) * _DAY
    unit, name = next(
        (size, name)
        for size, name in ((_DAY, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
        if high >= 2 * size or size == 1.0
    )
    return [Tick(v, f"{v / unit:.4g} {name}" if v else "0") for v in _multiples(0, high, step)]


def time_ticks_between(low: float, high: float, most: int) -> list[Tick]:
    """Return ticks from ``low`` to ``high`` seconds, labelled from ``low`` on."""
    return [
        Tick(tick.value + low, f"+{tick.text}" if tick.value else duration(low))
        for tick in time_ticks(high - low, most)
    ]


def byte_ticks(low: float, high: float, most: int) -> list[Tick]:
    """Return ticks from ``low`` to ``high`` bytes."""
    unit, name = (GIB, "GiB") if high >= 2 * GIB else (MIB, "MiB")
    step = nice_step((high - low) / unit, most) * unit
    return [Tick(v, f"{v / unit:.6g} {name}" if v else "0") for v in _multiples(low, high, step)]


def step_ticks(low: float, high: float, most: int) -> list[Tick]:
    """Return ticks for optimizer steps: integers."""
    step = max(nice_step(high - low, most), 1.0)
    return [Tick(v, f"{v:,.0f}") for v in _multiples(low, high, step)]


def number_ticks(low: float, high: float, most: int, *, is_log: bool = False) -> list[Tick]:
    """Return ticks for numbers; powers of ten where the scale is logarithmic."""
    if is_log:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        decades = range(first, last + 1, max(1, math.ceil((last - first + 1) / _MOST_DECADES)))
        ticks = [Tick(10.0**k, number(10.0**k)) for k in decades]
        if len(ticks) >= 2:
            return ticks
        between = [m * 10.0**k for k in range(first - 1, last + 1) for m in (1, 2, 5)]
        return [Tick(v, number(v)) for v in between if low <= v <= high]
    return [
        Tick(v, number(v) if abs(v) > 1e-12 else "0")
        for v in _multiples(low, high, nice_step(high - low, most))
    ]


def nice_step(span: float, most: int) -> float:
    """Return the smallest of 1, 2, 5, 10 … that cuts ``span`` into at most ``most`` pieces."""
    if not (span > 0 and math.isfinite(span)):
        return 1.0
    rough = span / most
    scale = 10.0 ** math.floor(math.log10(rough))
    return next((m * scale for m in (1, 2, 5) if m * scale >= rough * (1 - 1e-9)), 10 * scale)


def _multiples(low: float, high: float, step: float) -> list[float]:
    slack = 1e-9 * max(abs(low), abs(high), step)
    first, last = math.ceil((low - slack) / step), math.floor((high + slack) / step)
    return [round(k * step, 12) for k in range(first, last + 1)]


def thinned(points: Sequence[Point], column: float) -> list[Point]:
    """Return at most two points for each column of pixels: the lowest and the highest, in order.

    No extreme is lost, so the thinned line looks like the whole one.

    Args:
        points: in pixels, from left to right.
        column: width of a column in pixels.
    """
    if len(points) < 3:
        return list(points)
    kept = [points[0]]
    current = None
    lowest = highest = points[0]
    for point in points[1:-1]:
        here = math.floor(point[0] / column)
        if here != current:
            if current is not None:
                kept += _in_order(lowest, highest)
            current, lowest, highest = here, point, point
        elif point[1] < lowest[1]:
            lowest = point
        elif point[1] > highest[1]:
            highest = point
    kept += _in_order(lowest, highest) if current is not None else []
    kept.append(points[-1])
    return kept


def _in_order(one: Point, other: Point) -> list[Point]:
    if one is other or one == other:
        return [one]
    return [one, other] if one[0] <= other[0] else [other, one]


def path(points: Sequence[Point]) -> str:
    """Return points as an SVG path in relative steps of a tenth of a pixel."""
    parts = []
    x = y = 0
    for index, (px, py) in enumerate(points):
        nx, ny = round(10 * px), round(10 * py)
        dx, dy = nx - x, ny - y
        if index and not dx and not dy:
            continue
        parts.append(f"{'l' if index else 'M'}{dx / 10:g},{dy / 10:g}")
        x, y = nx, ny
    return "".join(parts)
