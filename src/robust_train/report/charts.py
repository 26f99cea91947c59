"""Computes the charts of a report, as data that the page's template and script draw.

`report.html` and `sweep.page` call it. ``templates/report.js`` passes a chart's lines to uPlot.
Legends, marks and the timeline are HTML.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from robust_train.folder.memory_samples import Sample
from robust_train.readable import duration, memory, number, shorten
from robust_train.report.facts import Curve, DeviceMemory, Mark, Story

Point = tuple[float, float]

Key = tuple[str, str]
"""An entry of a legend: a class of the style sheet and its meaning."""

Lanes = Mapping[str, Sequence[tuple[float, str]]]
"""Marks by lane: the position in percent of the x axis, and the text."""

LANES = {
    "oom": "OOM",
    "batch": "batch",
    "device": "device",
    "cleared": "cleared",
    "checkpoint": "saved",
    "milestone": "event",
}
"""The lanes of marks under a chart, in order, and their labels."""

# The figures of a memory sample, with the label and the style of their lines.
_MEMORY_LINES = {
    "gpu_used": ("whole GPU, all processes", "c3"),
    "reserved": ("reserved", "c2"),
    "allocated": ("allocated", "c1"),
    "resident": ("host memory of the process", "c4"),
}
_MOST_CHARTS = 8
_MOST_TEXTS = 4  # of marks at the same position
_LONGEST_TEXT = 160  # characters of a mark's text
_LOG_RATIO = 30.0  # of the largest to the smallest value, from which an axis is logarithmic
_COLOURS = 6


@dataclass(frozen=True)
class Line:
    """A line from left to right. It is interrupted where ``y`` is None."""

    name: str
    style: str
    x: Sequence[float]
    y: Sequence[float | None]
    is_area: bool = False
    is_lost: bool = False


@dataclass(frozen=True)
class Band:
    """A stretch of the x axis with its label above, such as an attempt."""

    start: float
    end: float
    label: str


@dataclass(frozen=True)
class Plot:
    """The data that the script draws: lines over an x axis from ``low`` to ``high``.

    The values over time are bytes, and other values are numbers. Values over a figure are dots.
    """

    x: Literal["time", "step", "figure"]
    high: float
    lines: Sequence[Line]
    bands: Sequence[Band] = ()
    level: float | None = None  # a horizontal line
    is_log: bool = False
    low: float = 0.0
    is_log_x: bool = False


@dataclass(frozen=True)
class Chart:
    """A plot with its caption, its legend, and the marks below it."""

    caption: str
    plot: Plot
    legend: Sequence[Key]
    lanes: Lanes = field(default_factory=dict)
    note: str = ""


class Clock:
    """Converts times to seconds of a job's own time, which stops between two launches."""

    def __init__(self, story: Story) -> None:
        self._start = 0.0
        end = 0.0
        if story.spans:
            self._start = story.spans[0].start
            end = story.spans[-1].end
        self._stops = [span for span in story.spans if span.use == "stopped"]
        self.seconds = max(self(end), 1e-3)

    def __call__(self, time: float) -> float:
        """Return the job's seconds until ``time``, which is in seconds since the epoch."""
        stopped = sum(max(min(stop.end, time) - stop.start, 0.0) for stop in self._stops)
        return time - self._start - stopped

    def percent(self, seconds: float) -> float:
        """Return seconds in percent of the job's whole time."""
        return 100 * min(max(seconds / self.seconds, 0.0), 1.0)


def memory_charts(story: Story) -> list[Chart]:
    """Draw memory over time for each device with at least two samples."""
    clock = Clock(story)
    return [
        _memory_chart(story, device, clock) for device in story.memory if len(device.samples) > 1
    ]


def _memory_chart(story: Story, device: DeviceMemory, clock: Clock) -> Chart:
    """Draw the memory of a device over time, with the attempts as bands."""
    is_cpu = device.device == "cpu"
    main_figure = "resident" if is_cpu else "allocated"
    attempts = [attempt for attempt in story.attempts if attempt.device == device.device]
    reported = max((attempt.peak_memory_bytes or 0 for attempt in attempts), default=0)
    lines: list[Line] = []
    legend: list[Key] = []
    highest = 0
    for name, (label, style) in _MEMORY_LINES.items():
        peak = device.most(name)
        # On a GPU, the host's memory matters little.
        if not peak or (name == "resident" and lines):
            continue
        highest = max(highest, peak)
        if name == main_figure:
            # The peak that an attempt reports may lie between two samples.
            peak = max(peak, reported)
        legend.append((style, f"{label}, at most {memory(peak)}"))
        x, y = _over_time(device.samples, name, clock)
        lines.append(Line(label, style, x, y, is_area=name != "reserved"))
    total = device.most("gpu_total")
    is_near = highest > total / 2 > 0
    if is_near:
        legend.append(("level", f"{memory(total)} in all"))
    bands = [
        Band(clock(attempt.started), clock(attempt.ended), str(attempt.number))
        for attempt in story.attempts
    ]
    return Chart(
        caption=f"Memory on {'the CPU' if is_cpu else device.device}",
        plot=Plot("time", clock.seconds, lines, bands, total if is_near else None),
        legend=legend,
        lanes=_lanes([m for m in story.marks if m.device == device.device], clock),
    )


def _over_time(
    samples: Sequence[Sample], name: str, clock: Clock
) -> tuple[list[float], list[float | None]]:
    """Return x and y of a figure over time. The line is interrupted between attempts."""
    x: list[float] = []
    y: list[float | None] = []
    for _, group in itertools.groupby(samples, key=lambda sample: sample.attempt):
        if x:
            x.append(x[-1] + 1e-4)
            y.append(None)
        measured = [sample for sample in group if getattr(sample, name) is not None]
        x += [round(clock(sample.time), 4) for sample in measured]
        y += [getattr(sample, name) for sample in measured]
    return x, y


def _lanes(marks: Iterable[Mark], clock: Clock) -> Lanes:
    """Return the marks by lane. Marks that would overlap are merged."""
    lanes: dict[str, dict[float, list[str]]] = {kind: {} for kind in LANES}
    for mark in marks:
        at = clock(mark.time)
        text = f"{mark.text} (attempt {mark.attempt}, {duration(at)})"
        texts = lanes[mark.kind].setdefault(round(clock.percent(at), 1), [])
        texts.append(shorten(text, _LONGEST_TEXT))
    merged: dict[str, list[tuple[float, str]]] = {}
    for kind, lane in lanes.items():
        for position, texts in lane.items():
            if len(texts) > _MOST_TEXTS:
                texts[_MOST_TEXTS:] = [f"… {len(texts)} in all"]
            merged.setdefault(kind, []).append((position, "\n".join(texts)))
    return merged


def curve_charts(story: Story) -> list[Chart]:
    """Draw the losses in a shared chart, and every other metric in its own chart."""
    groups: dict[str, list[Curve]] = {}
    for curve in story.curves:
        group = "loss" if "loss" in curve.name else curve.name
        groups.setdefault(group, []).append(curve)
    # Losses come first. The learning rate comes last, because it follows a known schedule.
    names = sorted(groups, key=lambda name: (name != "loss", name == "lr"))
    names_attempts = len(story.attempts) > 1
    charts = [_curve_chart(name, groups[name], names_attempts) for name in names[:_MOST_CHARTS]]
    not_drawn = ", ".join(names[_MOST_CHARTS:])
    if not_drawn:
        charts[-1] = replace(charts[-1], note=f"Not drawn: {not_drawn}.")
    return charts


def _curve_chart(name: str, curves: Sequence[Curve], names_attempts: bool) -> Chart:
    """Draw curves over steps. ``names_attempts`` adds the attempt to a line's name."""
    last_values = {curve.name: curve.points[-1][1] for curve in curves}
    styles = dict(zip(last_values, _styles(), strict=False))
    lost = [curve for curve in curves if curve.lost]
    kept = [curve for curve in curves if not curve.lost]
    lines = []
    # A line covers the lines before it, so lost curves come first.
    for curve in lost + kept:
        line_name = curve.name
        if names_attempts:
            line_name += f", attempt {curve.attempt}"
        lines.append(_line(line_name, styles[curve.name], curve.points, is_lost=curve.lost))
    legend = [(styles[each], f"{each}, last {number(last_values[each])}") for each in last_values]
    if lost:
        legend.append(("lost-line", "lost: done again, or not saved"))
    caption = name[:1].upper() + name[1:].replace("_", " ")
    if name == "lr":
        caption = "Learning rate"
    return _over_steps(caption, lines, legend, may_be_log=name == "loss")


def _styles() -> Iterator[str]:
    """Yield the styles of a chart's lines, again from the first after the last."""
    return itertools.cycle(f"c{index}" for index in range(1, _COLOURS + 1))


def _line(name: str, style: str, points: Iterable[Point], *, is_lost: bool) -> Line:
    pairs = list(points)
    return Line(name, style, [x for x, _ in pairs], [y for _, y in pairs], is_lost=is_lost)


def curves_of_jobs(
    name: str,
    jobs: Sequence[tuple[str, Sequence[Sequence[Point]], bool]],
    *,
    may_be_log: bool = False,
) -> list[Chart]:
    """Draw a figure of all jobs of a sweep in one chart. No chart if no job has the figure.

    ``jobs`` has each job's label, its curves, and whether it was pruned. Curves of pruned jobs are
    pale.
    """
    lines = []
    legend = []
    styles = _styles()
    for label, curves, is_pruned in jobs:
        if curves:
            style = next(styles)
            text = f"job {label}"
            if is_pruned:
                text += ", pruned"
            legend.append((style, text))
            lines += [_line(text, style, curve, is_lost=is_pruned) for curve in curves]
    if not lines:
        return []
    return [_over_steps(name, lines, legend, may_be_log=may_be_log)]


def value_over(caption: str, points: Sequence[tuple[str, float, bool]], note: str = "") -> Chart:
    """Draw the values of jobs over a parameter.

    ``points`` has, for each job, the parameter as text, the job's value, and whether it was pruned.
    If the texts are not all finite numbers, they are placed in alphabetical order.
    """
    places = [math.inf]
    with contextlib.suppress(ValueError):
        places = [float(text) for text, _, _ in points]
    if not all(math.isfinite(place) for place in places):
        names = sorted({text for text, _, _ in points})
        places = [float(names.index(text)) for text, _, _ in points]
        numbered = ", ".join(f"{index}: {text}" for index, text in enumerate(names))
        note = f"{numbered}. {note}"
    low = min(places)
    high = max(places)
    is_log = low > 0 and high / low > _LOG_RATIO
    values: dict[bool, dict[float, float]] = {True: {}, False: {}}
    for place, (_, value, is_pruned) in zip(places, points, strict=True):
        # uPlot draws one value at each place of a line.
        while place in values[is_pruned]:
            place = math.nextafter(place, math.inf)
        values[is_pruned][place] = value
    lines = []
    if values[True]:
        lines.append(_line("pruned", "c4", sorted(values[True].items()), is_lost=True))
    if values[False]:
        lines.append(_line("completed", "c1", sorted(values[False].items()), is_lost=False))
    # Leave room on both sides.
    if is_log:
        low /= 1.2
        high *= 1.2
    else:
        room = 0.05 * (high - low) or 0.5
        low -= room
        high += room
    plot = Plot("figure", high, lines, low=low, is_log_x=is_log)
    return Chart(caption, plot, [(line.style, line.name) for line in lines], note=note)


def _over_steps(
    name: str, lines: Sequence[Line], legend: Sequence[Key], *, may_be_log: bool
) -> Chart:
    """Return a chart over steps, with a logarithmic y axis if it may be and values differ much."""
    values = [value for line in lines for value in line.y if value is not None]
    low = min(values)
    high = max(values)
    plot = Plot(
        "step",
        max(1, *(step for line in lines for step in line.x)),
        lines,
        is_log=may_be_log and low > 0 and high / low > _LOG_RATIO,
    )
    return Chart(f"{name} over steps", plot, legend)
