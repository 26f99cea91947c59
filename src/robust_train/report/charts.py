"""What a chart consists of; ``templates/charts.html.j2`` draws it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from robust_train.readable import duration, number
from robust_train.values import GIB, MIB

WIDTH, HEIGHT = 1000, 200
"""Units of a line's path; the plot is stretched to the page's width, and as high in pixels."""

MOST_TICKS = 10

Point = tuple[float, float]

_TIME_STEPS = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200),
)
_DAY = 86400.0
_MOST_DECADES = 12
_LABEL_SHARE = 0.03


@dataclass(frozen=True)
class Tick:
    """A labelled position on an axis."""

    value: float
    text: str


@dataclass(frozen=True)
class Key:
    """An entry of a legend: a style's class and its meaning."""

    style: str
    text: str


@dataclass(frozen=True)
class Axis:
    """An axis: its range, its ticks, and its unit for read-outs."""

    low: float
    high: float
    ticks: Sequence[Tick]
    unit: str
    is_log: bool = False

    def share(self, value: float) -> float:
        """Return where a value lies between both ends, 0 to 1."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = (math.log10(max(v, self.low)) for v in (value, low, high))
        return (value - low) / (high - low) if high > low else 0.0

    def percent(self, value: float) -> float:
        """Return :meth:`share` in percent, within the axis."""
        return 100 * min(max(self.share(value), 0.0), 1.0)


@dataclass(frozen=True)
class Line:
    """A line as SVG paths; ``area`` is what lies below it, None where that means nothing."""

    name: str
    style: str
    path: str
    area: str | None = None


@dataclass(frozen=True)
class Band:
    """A stretch of the x axis, as an attempt is one."""

    start: float
    end: float
    label: str
    text: str


@dataclass(frozen=True)
class Chart:
    """Lines over one axis, with what happened in lanes below."""

    caption: str
    x: Axis
    y: Axis
    lines: Sequence[Line]
    legend: Sequence[Key]
    bands: Sequence[Band] = ()  # behind the lines
    # by label, (kind, x in percent, text) of each mark
    lanes: Mapping[str, Sequence[tuple[str, float, str]]] = field(default_factory=dict)
    level: Tick | None = None  # a horizontal line, or None
    note: str | None = None


@dataclass(frozen=True)
class Bar:
    """A stretch of a timeline's row."""

    start: float
    end: float
    style: str
    text: str


@dataclass(frozen=True)
class Timeline:
    """Rows of bars over one axis of time; each row has a label, a detail and its bars."""

    rows: Sequence[tuple[str, str, Sequence[Bar]]]
    x: Axis
    legend: Sequence[Key]
    note: str | None = None


def time_axis(low: float, high: float) -> Axis:
    """Return an axis of seconds."""
    return Axis(low, high, time_ticks(low, high, MOST_TICKS), "time")


def time_ticks(low: float, high: float, most: int) -> list[Tick]:
    """Return ticks from ``low`` to ``high`` seconds; unless ``low`` is 0, they count from there."""
    span = high - low
    fitting = (step for step in _TIME_STEPS if span / step <= most)
    step = next(fitting, None) or nice_step(span / _DAY, most) * _DAY
    unit, name = next(
        (size, name)
        for size, name in ((_DAY, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
        if span >= 2 * size or size == 1.0
    )
    before, first = ("+", duration(low)) if low else ("", "0")
    return [
        Tick(low + v, f"{before}{v / unit:.4g} {name}" if v else first)
        for v in _multiples(0, span, step)
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
    """Return ticks for numbers; powers of ten if the scale is logarithmic."""
    values = _multiples(low, high, nice_step(high - low, most))
    if is_log:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        every = max(1, math.ceil((last - first + 1) / _MOST_DECADES))
        values = [10.0**k for k in range(first, last + 1, every)]
        if len(values) < 2:
            between = [m * 10.0**k for k in range(first - 1, last + 1) for m in (1, 2, 5)]
            values = [v for v in between if low <= v <= high]
    return [Tick(v, number(v) if is_log or abs(v) > 1e-12 else "0") for v in values]


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


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return the first and last point, and the lowest and highest of each unit of x between. No
    extreme is lost, so the thinned line looks like the whole one. Points go from left to right."""
    kept = list(points[:1])
    columns: dict[int, tuple[Point, Point]] = {}
    for point in points[1:-1]:
        column = math.floor(point[0])
        lowest, highest = columns.get(column, (point, point))
        if point[1] < lowest[1]:
            lowest = point
        elif point[1] > highest[1]:
            highest = point
        columns[column] = lowest, highest
    for pair in columns.values():
        kept += sorted(dict.fromkeys(pair), key=lambda point: point[0])
    return kept + list(points[1:][-1:])


def path(points: Sequence[Point]) -> str:
    """Return points as an SVG path in relative steps of a tenth of a unit: what the page's script
    reads."""
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


def line_of(
    name: str,
    style: str,
    pieces: Iterable[Sequence[Point]],
    x: Axis,
    y: Axis,
    *,
    is_area: bool = False,
) -> Line:
    paths, areas = [], []
    for piece in pieces:
        points = thinned([(WIDTH * x.share(a), HEIGHT * (1 - y.share(b))) for a, b in piece])
        (left, up), (right, _) = points[0], points[-1]
        if len(points) == 1:  # a line of no length is not drawn
            points = [(left - 3, up), (right + 3, up)]
        paths.append(path(points))
        areas.append(f"{paths[-1]}L{right:.1f},{HEIGHT}L{left:.1f},{HEIGHT}Z")
    return Line(name, style, "".join(paths), "".join(areas) if is_area else None)


def labelled(bands: Iterable[Band], x: Axis) -> list[Band]:
    """Return the bands within the axis, without labels that would lie over each other."""
    free, kept = 0.0, []
    for band in bands:
        start = max(x.share(band.start), 0.0)
        room = _LABEL_SHARE * (len(band.label) + 1)
        if start <= 1 and x.share(band.end) >= 0:
            is_free = free <= start <= 1 - room
            kept.append(band if is_free else replace(band, label=""))
            free = start + room if is_free else free
    return kept
