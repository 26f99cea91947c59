"""Charts as inline SVG. Pure: values in, text out; colours come from the page's style.

Every chart is drawn twice, for a wide and for a narrow screen, because text in a picture that is
scaled down to a telephone's width cannot be read. The page shows one of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from urllib.parse import quote

from robust_train.readable import shortened
from robust_train.report.axes import Point, Scale, Tick, path, thinned

_LONGEST_TEXT = 160
_TEXTS_A_GLYPH = 4
_TOP = 18.0
_LANE = 20.0
_AXIS = 24.0
_GLYPHS = {
    "oom": "M0,-5.5L5.5,4.5H-5.5Z",
    "batch": "M-4.5,-4.5H4.5V4.5H-4.5Z",
    "device": "M0,-5.5L5.5,0L0,5.5L-5.5,0Z",
    "cleared": "M-5,0A5,5 0 1 0 5,0A5,5 0 1 0 -5,0Z",
    "checkpoint": "M-1.5,-5H1.5V5H-1.5Z",
    "milestone": "M-1,-5H1V5H-1Z",
}


@dataclass(frozen=True)
class Size:
    """Measures of a chart in pixels: its width, the room left of it for labels, its plot's height.

    ``columns`` is how wide a column is that a line is thinned to.
    """

    name: str
    width: float
    gutter: float
    height: float
    ticks: int
    column: float


WIDE = Size("wide", 960, 76, 200, 10, 1.0)
NARROW = Size("narrow", 360, 58, 170, 4, 0.75)
SIZES = (WIDE, NARROW)


@dataclass(frozen=True)
class Line:
    """A line: its name, its style's class, and its pieces, between which it is interrupted."""

    name: str
    style: str
    pieces: tuple[tuple[Point, ...], ...]
    is_area: bool = False


@dataclass(frozen=True)
class Band:
    """A stretch of the x axis with a label, as an attempt is one."""

    start: float
    end: float
    label: str
    text: str


@dataclass(frozen=True)
class Glyph:
    """Something at one position of the x axis, drawn in the lane of its kind."""

    kind: str
    x: float
    text: str


@dataclass(frozen=True)
class Axis:
    """An axis: its range, its ticks for a number of them at most, its unit for read-outs."""

    low: float
    high: float
    ticks: Callable[[int], list[Tick]]
    unit: str
    is_log: bool = False


@dataclass(frozen=True)
class Chart:
    """What is drawn.

    Attributes:
        title: one line.
        description: what it shows in a sentence, for those who cannot see it.
        x, y: its axes.
        lines: drawn in this order.
        bands: behind them.
        lanes: (kind, label), one under the other.
        glyphs: in the lanes.
        level: a horizontal line with a label, or None.
    """

    title: str
    description: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    bands: tuple[Band, ...] = ()
    lanes: tuple[tuple[str, str], ...] = ()
    glyphs: tuple[Glyph, ...] = ()
    level: tuple[float, str] | None = None


@dataclass(frozen=True)
class Bar:
    """A stretch of a row of a timeline: its class, and what it was."""

    start: float
    end: float
    style: str
    text: str


@dataclass(frozen=True)
class TimelineRow:
    """A row of a timeline: a label, a detail, and a link or None."""

    label: str
    detail: str
    bars: tuple[Bar, ...]
    href: str | None = None


def chart(content: Chart) -> str:
    """Return the chart in both sizes."""
    return "".join(_chart(content, size) for size in SIZES)


def timeline(title: str, description: str, rows: Sequence[TimelineRow], x: Axis) -> str:
    """Return rows of bars along one axis of time, in both sizes."""
    return "".join(_timeline(title, description, rows, x, size) for size in SIZES)


def _chart(content: Chart, size: Size) -> str:
    bottom = _TOP + size.height
    height = bottom + _AXIS + _LANE * len(content.lanes) + 4
    x = Scale(content.x.low, content.x.high, size.gutter, size.width - 8)
    y = Scale(content.y.low, content.y.high, bottom, _TOP, content.y.is_log)
    width = x.stop - x.start
    data = (
        f'data-plot="{x.start:g},{_TOP:g},{x.stop:g},{bottom:g}" '
        f'data-x="{x.low!r},{x.high!r},{content.x.unit}" '
        f'data-y="{y.low!r},{y.high!r},{content.y.unit},{"log" if y.is_log else ""}"'
    )
    parts = [
        *_bands(content.bands, x, bottom),
        *_horizontal(content.y.ticks(5), y, x),
        *_vertical(content.x.ticks(size.ticks), x, bottom, size),
        # a picture within the picture cuts off what lies outside of the axes
        f'<svg x="{x.start:g}" y="{_TOP - 2:g}" width="{width:g}" height="{size.height + 4:g}" '
        f'viewBox="{x.start:g} {_TOP - 2:g} {width:g} {size.height + 4:g}">',
        *(part for line in content.lines for part in _line(line, x, y, size)),
        "</svg>",
        *_level(content.level, x, y),
        *_lanes(content, x, bottom + _AXIS),
    ]
    return _svg(content.title, content.description, size, height, parts, data)


def _svg(
    title: str,
    description: str,
    size: Size,
    height: float,
    parts: Sequence[str],
    data: str = "",
) -> str:
    # its name is no <title>: browsers would show that one all over the chart
    return (
        f'<svg class="plot {size.name}" viewBox="0 0 {size.width:g} {height:g}" role="img" '
        f'aria-label="{_text(title)}" {data}><desc>{_text(description)}</desc>'
        f"{''.join(parts)}</svg>"
    )


def _bands(bands: Sequence[Band], x: Scale, bottom: float) -> Iterator[str]:
    free = x.start
    for index, band in enumerate(bands):
        left, right = max(x(band.start), x.start), min(x(band.end), x.stop)
        if right < left:
            continue
        width = max(right - left, 0.5)
        yield (
            f'<rect class="band b{index % 2}" x="{left:.1f}" y="{_TOP:g}" width="{width:.1f}" '
            f'height="{bottom - _TOP:g}"><title>{_text(band.text)}</title></rect>'
        )
        if left >= free and left + 6 * len(band.label) <= x.stop:
            yield f'<text class="band-label" x="{left + 3:.1f}" y="13">{_text(band.label)}</text>'
            free = left + 3 + 6.5 * len(band.label) + 6


def _horizontal(ticks: Sequence[Tick], y: Scale, x: Scale) -> Iterator[str]:
    for tick in ticks:
        at = y(tick.value)
        yield f'<path class="grid" d="M{x.start:g},{at:.1f}H{x.stop:g}"/>'
        yield (
            f'<text class="tick end" x="{x.start - 7:g}" y="{at + 4:.1f}">{_text(tick.text)}</text>'
        )


def _vertical(ticks: Sequence[Tick], x: Scale, bottom: float, size: Size) -> Iterator[str]:
    for tick in ticks:
        at = x(tick.value)
        half = 3.2 * len(tick.text)
        anchor = "end" if at + half > size.width else "middle"
        where = size.width if anchor == "end" else at
        yield f'<path class="axis" d="M{at:.1f},{bottom:g}v4"/>'
        yield (
            f'<text class="tick {anchor}" x="{where:.1f}" y="{bottom + 17:g}">'
            f"{_text(tick.text)}</text>"
        )
    yield f'<path class="axis" d="M{x.start:g},{bottom:g}H{x.stop:g}"/>'


def _line(line: Line, x: Scale, y: Scale, size: Size) -> Iterator[str]:
    paths = []
    for piece in line.pieces:
        across, up = x.many(a for a, _ in piece), y.many(b for _, b in piece)
        points = thinned(list(zip(across, up, strict=True)), size.column)
        if len(points) == 1:
            (px, py) = points[0]
            points = [(px - 3, py), (px + 3, py)]  # a line of no length is not drawn
        drawn = path(points)
        paths.append(drawn)
        if line.is_area:
            left, right = points[0][0], points[-1][0]
            yield (
                f'<path class="area {line.style}" '
                f'd="{drawn}L{right:.1f},{y.start:g}L{left:.1f},{y.start:g}Z"/>'
            )
    yield f'<path class="line {line.style}" data-name="{_text(line.name)}" d="{"".join(paths)}"/>'


def _level(level: tuple[float, str] | None, x: Scale, y: Scale) -> Iterator[str]:
    if level is None:
        return
    at = y(level[0])
    yield f'<path class="level" d="M{x.start:g},{at:.1f}H{x.stop:g}"/>'
    yield f'<text class="tick end" x="{x.stop:g}" y="{at + 13:.1f}">{_text(level[1])}</text>'


def _lanes(content: Chart, x: Scale, top: float) -> Iterator[str]:
    for index, (kind, label) in enumerate(content.lanes):
        middle = top + _LANE * (index + 0.5)
        yield f'<path class="grid" d="M{x.start:g},{middle:g}H{x.stop:g}"/>'
        yield f'<text class="tick end" x="{x.start - 7:g}" y="{middle + 4:g}">{_text(label)}</text>'
        own = [glyph for glyph in content.glyphs if glyph.kind == kind]
        for column, group in itertools.groupby(own, key=lambda glyph: round(x(glyph.x) / 3)):
            texts = [glyph.text for glyph in group]
            title = "\n".join(shortened(text, _LONGEST_TEXT) for text in texts[:_TEXTS_A_GLYPH])
            if len(texts) > _TEXTS_A_GLYPH:
                title += f"\n… {len(texts)} in all"
            at = min(max(3.0 * column, x.start), x.stop)
            yield (
                f'<path class="glyph {kind}" transform="translate({at:g},{middle:g})" '
                f'd="{_GLYPHS[kind]}"><title>{_text(title)}</title></path>'
            )


def _timeline(
    title: str, description: str, rows: Sequence[TimelineRow], x: Axis, size: Size
) -> str:
    beside = size is WIDE
    longest = max((len(f"{row.label}  {row.detail}") for row in rows), default=0)
    gutter = min(20 + 7.0 * longest, 300.0) if beside else 2.0
    room = int((gutter - 20) / 6.6) if beside else 46
    row_height, bar_height = (26.0, 16.0) if beside else (36.0, 14.0)
    bottom = 6 + row_height * len(rows)
    scale = Scale(x.low, x.high, gutter, size.width - 8)
    ticks = x.ticks(size.ticks if beside else 5)
    parts = [f'<path class="grid" d="M{scale(t.value):.1f},4V{bottom:g}"/>' for t in ticks]
    for index, row in enumerate(rows):
        top = 6 + row_height * index
        bar_top = top + (row_height - bar_height) / 2 if beside else top + 18
        label = shortened(f"{row.label}  {row.detail}", room)
        words = f'<tspan class="strong">{_text(label[: len(row.label)])}</tspan>'
        words += _text(label[len(row.label) :])
        words = (
            f'<text class="row" x="2" y="{(bar_top + 12) if beside else top + 13:g}">{words}</text>'
        )
        if row.href is not None:
            words = f'<a href="{_text(row.href)}">{words}</a>'
        parts.append(words)
        parts += _bars(row.bars, scale, bar_top, bar_height)
    parts += _vertical(ticks, scale, bottom, size)
    return _svg(title, description, size, bottom + _AXIS, parts)


def _bars(bars: Sequence[Bar], x: Scale, top: float, height: float) -> Iterator[str]:
    for bar in bars:
        left = x(bar.start)
        # what was short is still to be seen
        width = max(x(bar.end) - left, 1.0)
        yield (
            f'<rect class="use {bar.style}" x="{left:.1f}" y="{top:g}" width="{width:.1f}" '
            f'height="{height:g}" rx="1.5"><title>{_text(bar.text)}</title></rect>'
        )


def address(path: str | None) -> str | None:
    """Return a relative path as an address."""
    return None if path is None else quote(path, safe="/", errors="replace")


def _text(text: str) -> str:
    """Escape for text and attributes, without characters that no document may hold."""
    return escape("".join(c if c >= " " or c == "\n" else "�" for c in text))
