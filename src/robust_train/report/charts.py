"""The charts of a report, as data that the page's template and script draw. Pure.

``templates/report.js`` passes a chart's lines to uPlot. Legends, marks and the timeline are HTML.
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
# an entry of a legend: a class of the style sheet and its meaning
Key = tuple[str, str]

Lanes = Mapping[str, Sequence[tuple[float, str]]]

LANES = {
    "oom": "OOM",
    "batch": "batch",
    "device": "device",
    "cleared": "cleared",
    "checkpoint": "saved",
    "milestone": "event",
}
"""The lanes of marks under a chart, in their order, and their labels."""

_MEMORY_LINES = {
    "gpu_used": ("whole GPU, all processes", "c3"),
    "reserved": ("reserved", "c2"),
    "allocated": ("allocated", "c1"),
    "resident": ("host memory of the process", "c4"),
}
_MOST_CHARTS = 8
_MOST_TEXTS = 4
_LONGEST_TEXT = 160
_LOG_RATIO = 30.0
_COLOURS = 6


@dataclass(frozen=True)
class Line:
    """A line from left to right. A ``y`` of None interrupts it."""

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
    """The data that the script draws: lines over an x axis from ``low`` to ``high``. Over time they
    are bytes, else numbers. Over a figure they are dots."""

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
    """A plot with its caption, its legend, and its marks by lane: their positions, in percent of
    the x axis, and their texts."""

    caption: str
    plot: Plot
    legend: Sequence[Key]
    lanes: Lanes = field(default_factory=dict)
    note: str = ""


class Clock:
    """Seconds of a job's own time, which stops between two launches."""

    def __init__(self, story: Story) -> None:
        self._start = story.spans[0].start if story.spans else 0.0
        self._stops = [span for span in story.spans if span.use == "stopped"]
        end = story.spans[-1].end if story.spans else self._start
        self.seconds = max(self(end), 1e-3)

    def __call__(self, time: float) -> float:
        """Return the seconds of the job until a moment."""
        away = sum(max(min(stop.end, time) - stop.start, 0.0) for stop in self._stops)
        return time - self._start - away

    def percent(self, seconds: float) -> float:
        """Return a length of time in percent of the whole."""
        return 100 * min(max(seconds / self.seconds, 0.0), 1.0)


def memory_charts(story: Story) -> list[Chart]:
    """Draw memory over time for each device with at least two samples."""
    clock = Clock(story)
    return [
        _memory_chart(story, device, clock) for device in story.memory if len(device.samples) > 1
    ]


def _memory_chart(story: Story, device: DeviceMemory, clock: Clock) -> Chart:
    is_cpu = device.device == "cpu"
    reported = max(
        (a.peak_memory_bytes or 0 for a in story.attempts if a.device == device.device), default=0
    )
    lines: list[Line] = []
    legend: list[Key] = []
    highest = 0
    for name, (label, style) in _MEMORY_LINES.items():
        peak = device.most(name)
        # host memory matters little where there is a GPU's
        if not peak or (name == "resident" and lines):
            continue
        highest = max(highest, peak)
        if name == ("resident" if is_cpu else "allocated"):
            # the peak that an attempt reports may lie between two samples
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
    """Return x and y of a figure's line, which is interrupted between attempts."""
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
    """Return the marks by lane, merging marks that would overlap."""
    lanes: dict[str, dict[float, list[str]]] = {kind: {} for kind in LANES}
    for mark in marks:
        at = clock(mark.time)
        text = f"{mark.text} (attempt {mark.attempt}, {duration(at)})"
        texts = lanes[mark.kind].setdefault(round(clock.percent(at), 1), [])
        texts.append(shorten(text, _LONGEST_TEXT))
    for texts in (texts for lane in lanes.values() for texts in lane.values()):
        if len(texts) > _MOST_TEXTS:
            texts[_MOST_TEXTS:] = [f"… {len(texts)} in all"]
    joined: dict[str, list[tuple[float, str]]] = {}
    for kind, lane in lanes.items():
        if lane:
            joined[kind] = [(at, "\n".join(texts)) for at, texts in lane.items()]
    return joined


def curve_charts(story: Story) -> list[Chart]:
    """Draw the losses in a shared chart, and every other metric in its own chart."""
    groups: dict[str, list[Curve]] = {}
    for curve in story.curves:
        group = "loss" if "loss" in curve.name else curve.name
        groups.setdefault(group, []).append(curve)
    # losses first, and the learning rate, which follows a known schedule, last
    order = sorted(groups, key=lambda name: (name != "loss", name == "lr"))
    has_several = len(story.attempts) > 1
    charts = [_curve_chart(name, groups[name], has_several) for name in order[:_MOST_CHARTS]]
    more = ", ".join(order[_MOST_CHARTS:])
    if more:
        charts[-1] = replace(charts[-1], note=f"Not drawn: {more}.")
    return charts


def _curve_chart(name: str, curves: Sequence[Curve], has_several: bool) -> Chart:
    last = {curve.name: curve.points[-1][1] for curve in curves}
    styles = dict(zip(last, _styles(), strict=False))
    lines = [
        _line(
            f"{curve_shown.name}, attempt {curve_shown.attempt}"
            if has_several
            else curve_shown.name,
            styles[curve_shown.name],
            curve_shown.points,
            is_lost=curve_shown.lost,
        )
        # lost ones lie behind
        for curve_shown in sorted(curves, key=lambda curve: not curve.lost)
    ]
    legend = [(styles[line], f"{line}, last {number(value)}") for line, value in last.items()]
    if any(curve.lost for curve in curves):
        legend.append(("lost-line", "lost: done again, or not saved"))
    caption = name[:1].upper() + name[1:].replace("_", " ")
    return _over_steps(
        "Learning rate" if name == "lr" else caption, lines, legend, may_be_log=name == "loss"
    )


def _styles() -> Iterator[str]:
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
    """Draw a figure of all jobs of a sweep in a chart, if a job has it.

    ``jobs`` are (label, curves, whether the job was pruned). Curves of pruned jobs are pale.
    """
    lines = []
    legend = []
    styles = _styles()
    for label, curves, is_pruned in jobs:
        if curves:
            style = next(styles)
            text = f"job {label}{', pruned' if is_pruned else ''}"
            legend.append((style, text))
            lines += [_line(text, style, curve, is_lost=is_pruned) for curve in curves]
    if not lines:
        return []
    return [_over_steps(name, lines, legend, may_be_log=may_be_log)]


def value_over(caption: str, points: Sequence[tuple[str, float, bool]], note: str = "") -> Chart:
    """Draw the value of each job over a parameter: (its text, value, whether it was pruned).

    Each text that is not a number has its own place. If a value is infinite, all have.
    """
    places = [math.inf]
    with contextlib.suppress(ValueError):
        places = [float(text) for text, _, _ in points]
    if not all(map(math.isfinite, places)):
        names = sorted({text for text, _, _ in points})
        places = [float(names.index(text)) for text, _, _ in points]
        note = f"{', '.join(f'{n}: {text}' for n, text in enumerate(names))}. {note}"
    low = min(places)
    high = max(places)
    is_log = low > 0 and high / low > _LOG_RATIO
    values: dict[bool, dict[float, float]] = {True: {}, False: {}}
    for place, (_, value, is_pruned) in zip(places, points, strict=True):
        while place in values[is_pruned]:  # a line has one value at each place
            place = math.nextafter(place, math.inf)
        values[is_pruned][place] = value
    lines = [
        _line(
            "pruned" if is_pruned else "completed",
            "c4" if is_pruned else "c1",
            sorted(line.items()),
            is_lost=is_pruned,
        )
        for is_pruned, line in values.items()
        if line
    ]
    room = 0.05 * (high - low) or 0.5
    low, high = (low / 1.2, high * 1.2) if is_log else (low - room, high + room)
    plot = Plot("figure", high, lines, low=low, is_log_x=is_log)
    return Chart(caption, plot, [(line.style, line.name) for line in lines], note=note)


def _over_steps(
    name: str, lines: Sequence[Line], legend: Sequence[Key], *, may_be_log: bool
) -> Chart:
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
