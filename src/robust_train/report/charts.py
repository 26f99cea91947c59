"""The charts of a report, as data that the page's template and script draw. Pure.

``templates/report.js`` hands a chart's lines to uPlot; legends, marks and the timeline are HTML.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from robust_train.folder.memory_samples import Sample
from robust_train.readable import duration, memory, number, shortened
from robust_train.report.facts import Curve, DeviceMemory, Mark, Story, Use
from robust_train.report.sources import TimedAttempt

Point = tuple[float, float]

MOST_POINTS = 4000
"""Points of one line; more are thinned."""

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
_MARKS_PER_LANE = 250


@dataclass(frozen=True)
class Key:
    """An entry of a legend: a class of the style sheet and its meaning."""

    style: str
    text: str


@dataclass(frozen=True)
class Line:
    """A line from left to right. A ``y`` of None interrupts it."""

    name: str
    style: str
    x: Sequence[float]
    y: Sequence[float | None]
    is_area: bool = False
    is_lost: bool = False
    is_dots: bool = False  # no line


@dataclass(frozen=True)
class Band:
    """A stretch of the x axis with its label above, such as an attempt."""

    start: float
    end: float
    label: str


@dataclass(frozen=True)
class Plot:
    """What the script draws: lines over an x axis from ``low`` to ``high``."""

    x: Literal["time", "step", "figure"]
    y: Literal["bytes", "number"]
    high: float
    lines: Sequence[Line]
    bands: Sequence[Band] = ()
    level: float | None = None  # a horizontal line
    is_log: bool = False
    low: float = 0.0
    is_log_x: bool = False


@dataclass(frozen=True)
class DrawnMark:
    """A mark in a lane, in percent of the x axis."""

    left: float
    text: str


@dataclass(frozen=True)
class Lane:
    """The marks of one kind."""

    kind: str
    label: str
    marks: Sequence[DrawnMark]


@dataclass(frozen=True)
class Chart:
    """A plot with its caption, its legend, and lanes of marks."""

    caption: str
    plot: Plot
    legend: Sequence[Key]
    lanes: Sequence[Lane] = ()
    note: str = ""


class Clock:
    """Seconds of a job's own time, which stops between two launches."""

    def __init__(self, story: Story) -> None:
        self._start = story.started or 0.0
        self._stops = [span for span in story.spans if span.use is Use.STOPPED]
        self.seconds = max(self(story.ended or self._start), 1e-3)

    def __call__(self, time: float) -> float:
        """Return the seconds of the job until a moment."""
        before = [stop for stop in self._stops if time > stop.start]
        away = sum(min(stop.end, time) - stop.start for stop in before)
        return time - self._start - away

    def percent(self, seconds: float) -> float:
        """Return a length of time in percent of the whole."""
        return 100 * min(max(seconds / self.seconds, 0.0), 1.0)


def size_text(attempt: TimedAttempt) -> str:
    """Return ``16 × 4``: micro-batch times accumulation, times processes if there are several."""
    spec = attempt.spec
    ranks = f" × {spec.ranks}" if spec.ranks != 1 else ""
    size = f"{spec.batch_size} × {spec.gradient_accumulation_steps or '?'}{ranks}"
    return size if spec.has_batch else "?"


def memory_charts(story: Story) -> list[Chart]:
    """Draw memory over time for each device that has more than one sample."""
    clock = Clock(story)
    return [
        _memory_chart(story, device, clock)
        for device in story.memory
        if len(device.samples) > 1
        or any(m.device == device.device for m in story.marks)
    ]


def _memory_chart(
    story: Story,
    device: DeviceMemory,
    clock: Clock,
) -> Chart:
    is_cpu = device.device == "cpu"
    attempts = [one for one in story.attempts if one.device == device.device]
    peaks = {name: device.most(name) or 0 for name in _MEMORY_LINES}
    if not is_cpu and any(peaks[name] for name in _MEMORY_LINES if name != "resident"):
        peaks["resident"] = 0  # host memory matters little beside a GPU's
    total = device.most("gpu_total")
    if total is not None and max(peaks.values()) <= total / 2:
        total = None
    # the peak that an attempt reports may lie between two samples
    trainers = "resident" if is_cpu else "allocated"
    own = [attempt.peak_memory_bytes or 0 for attempt in attempts]
    lines, legend = [], []
    for name, peak in peaks.items():
        if peak:
            label, style = _MEMORY_LINES[name]
            most = max([peak, *own]) if name == trainers else peak
            legend.append(Key(style, f"{label}, at most {memory(most)}"))
            x, y = _over_time(device.samples, name, clock)
            lines.append(
                Line(
                    label,
                    style,
                    x,
                    y,
                    is_area=name != "reserved",
                )
            )
    if total is not None:
        legend.append(Key("level", f"{memory(total)} in all"))
    bands = [
        Band(
            clock(one.started),
            clock(one.ended),
            str(one.number),
        )
        for one in story.attempts
    ]
    note = "Only what the trainer reported: these attempts have no samples."
    return Chart(
        caption=f"Memory on {'the CPU' if is_cpu else device.device}",
        plot=Plot(
            "time",
            "bytes",
            clock.seconds,
            lines,
            bands,
            total,
        ),
        legend=legend,
        lanes=_lanes([m for m in story.marks if m.device == device.device], clock),
        note="" if device.sampled else note,
    )


def _over_time(
    samples: Sequence[Sample],
    name: str,
    clock: Clock,
) -> tuple[list[float], list[float | None]]:
    """Return x and y of one figure's line, which is interrupted between attempts."""
    x: list[float] = []
    y: list[float | None] = []
    known = [sample for sample in samples if getattr(sample, name) is not None]
    for _, own in itertools.groupby(known, key=lambda sample: sample.attempt):
        if x:
            x.append(x[-1] + 1e-4)
            y.append(None)
        for at, value in thinned([(clock(s.time), getattr(s, name)) for s in own]):
            x.append(round(at, 4))
            y.append(value)
    return x, y


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> Sequence[Point]:
    """Return about ``most`` points: both ends, and the extremes of each few neighbours. So the line
    keeps its peaks."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    kept = [points[0]]
    for start in range(1, len(points) - 1, size):
        group = points[start : min(start + size, len(points) - 1)]
        values = [y for _, y in group]
        extremes = {values.index(min(values)), values.index(max(values))}
        kept += [group[index] for index in sorted(extremes)]
    return [*kept, points[-1]]


def _lanes(marks: Iterable[Mark], clock: Clock) -> list[Lane]:
    """Return the marks by lane; marks that would overlap become one."""
    lanes: dict[str, dict[int, list[str]]] = {kind: {} for kind in LANES}
    for mark in marks:
        at = clock(mark.time)
        text = f"{mark.text} (attempt {mark.attempt}, {duration(at)})"
        column = round(_MARKS_PER_LANE * clock.percent(at) / 100)
        texts = lanes[mark.kind].setdefault(column, [])
        texts.append(shortened(text, _LONGEST_TEXT))
    return [
        Lane(
            kind,
            LANES[kind],
            [_drawn(column, lane[column]) for column in lane],
        )
        for kind, lane in lanes.items()
        if lane
    ]


def _drawn(column: int, texts: Sequence[str]) -> DrawnMark:
    more = [f"… {len(texts)} in all"] if len(texts) > _MOST_TEXTS else []
    text = "\n".join([*texts[:_MOST_TEXTS], *more])
    return DrawnMark(100 * column / _MARKS_PER_LANE, text)


def curve_charts(story: Story) -> list[Chart]:
    """Draw the losses in one chart and every other metric in its own."""
    groups: dict[str, list[Curve]] = {}
    drawn = {curve.name for curve in story.curves if len(curve.points) > 1}
    for curve in story.curves:
        if curve.name in drawn:
            group = "loss" if "loss" in curve.name else curve.name
            groups.setdefault(group, []).append(curve)
    # losses first, and the learning rate, which follows a known schedule, last
    order = sorted(groups, key=lambda name: (name != "loss", name == "lr"))
    more = ", ".join(order[_MOST_CHARTS:])
    shown = order[:_MOST_CHARTS]
    notes = {shown[-1]: f"Not drawn: {more}."} if more else {}
    return [
        _curve_chart(
            name,
            groups[name],
            story.attempts,
            notes.get(name, ""),
        )
        for name in shown
    ]


def reported_once(story: Story) -> list[tuple[str, str]]:
    """Return the metrics that have a single value, too few for a curve."""
    several = {curve.name for curve in story.curves if len(curve.points) > 1}
    last = {curve.name: number(curve.points[-1][1]) for curve in story.curves}
    return [(name, value) for name, value in last.items() if name not in several]


def _curve_chart(
    name: str,
    curves: Sequence[Curve],
    attempts: Sequence[TimedAttempt],
    note: str,
) -> Chart:
    last = {curve.name: curve.points[-1][1] for curve in curves}
    styles = dict(zip(last, _styles(), strict=False))
    lines, legend = [], []
    for curve in sorted(curves, key=lambda one: not one.lost):  # lost steps lie behind
        whose = f", attempt {curve.attempt}" if len(attempts) > 1 else ""
        lines.append(
            _curve_line(
                curve.name + whose,
                styles[curve.name],
                curve,
            )
        )
    for one, value in last.items():
        legend.append(Key(styles[one], f"{one}, last {number(value)}"))
    if any(curve.lost for curve in curves):
        legend.append(Key("lost-line", "lost: done again, or not saved"))
    drawn = {curve.attempt for curve in curves}
    shown = [attempt for attempt in attempts if attempt.number in drawn]
    plot = _plot_over_steps(
        lines,
        shown,
        may_be_log=name == "loss",
    )
    caption = name[:1].upper() + name[1:].replace("_", " ")
    caption = "Learning rate" if name == "lr" else caption
    return Chart(
        f"{caption} over steps",
        plot,
        legend,
        note=note,
    )


def _styles() -> Iterator[str]:
    return itertools.cycle(f"c{index}" for index in range(1, _COLOURS + 1))


def _curve_line(
    name: str,
    style: str,
    curve: Curve,
) -> Line:
    points = thinned(curve.points)
    x, y = [step for step, _ in points], [value for _, value in points]
    return Line(name, style, x, y, is_lost=curve.lost)


def curves_of_jobs(
    name: str,
    jobs: Sequence[tuple[str, Sequence[Sequence[Point]], bool]],
    *,
    may_be_log: bool = False,
) -> Chart | None:
    """Draw a figure of each job of a sweep in one chart; None if no job has it.

    ``jobs`` are (label, curves, whether the job was pruned); those of pruned ones are pale.
    """
    lines, legend = [], []
    styles = _styles()
    for label, curves, is_pruned in jobs:
        if curves:
            key = Key(next(styles), f"job {label}{', pruned' if is_pruned else ''}")
            legend.append(key)
            for curve in curves:
                x, y = zip(*thinned(curve), strict=True)
                lines.append(
                    Line(
                        key.text,
                        key.style,
                        x,
                        y,
                        is_lost=is_pruned,
                    )
                )
    if not lines:
        return None
    plot = _plot_over_steps(
        lines,
        (),
        may_be_log=may_be_log,
    )
    return Chart(f"{name} over steps", plot, legend)


def value_over(
    caption: str,
    points: Sequence[tuple[str, float, bool]],
    note: str = "",
) -> Chart:
    """Draw the value of each job over a parameter: (its text, value, whether it was pruned).

    What is no number has a place of its own for each text.
    """
    try:
        places = [float(text) for text, _, _ in points]
        names: list[str] = []
    except ValueError:
        names = sorted({text for text, _, _ in points})
        places = [float(names.index(text)) for text, _, _ in points]
        note = f"{', '.join(f'{n}: {text}' for n, text in enumerate(names))}. {note}"
    low, high = min(places), max(places)
    is_log = not names and low > 0 and high / low > _LOG_RATIO
    # a chart has one value at each place
    beside = (high - low or 1.0) * 1e-4
    lines = []
    for is_pruned, name in ((True, "pruned"), (False, "completed")):
        own: dict[float, float] = {}
        for place, (_, value, was_pruned) in zip(places, points, strict=True):
            while place in own:
                place *= 1.001 if is_log else 1.0
                place += 0.0 if is_log else beside
            if was_pruned == is_pruned:
                own[place] = value
        if own:
            x, y = zip(*sorted(own.items()), strict=True)
            style = "c4" if is_pruned else "c1"
            lines.append(
                Line(
                    name,
                    style,
                    x,
                    y,
                    is_lost=is_pruned,
                    is_dots=True,
                )
            )
    room = 0.0 if is_log else 0.05 * (high - low) or 0.5
    low, high = (low / 1.2, high * 1.2) if is_log else (low - room, high + room)
    plot = Plot(
        "figure",
        "number",
        high,
        lines,
        low=low,
        is_log_x=is_log,
    )
    return Chart(
        caption,
        plot,
        [Key(one.style, one.name) for one in lines],
        note=note,
    )


def _plot_over_steps(
    lines: Sequence[Line],
    attempts: Sequence[TimedAttempt],
    *,
    may_be_log: bool,
) -> Plot:
    values = [value for line in lines for value in line.y if value is not None]
    low, high = min(values), max(values)
    is_log = may_be_log and low > 0 and high / low > _LOG_RATIO
    steps = [step for line in lines for step in line.x]
    end = max(1, *steps)
    bands = _beginnings(attempts, end)
    return Plot(
        "step",
        "number",
        end,
        lines,
        bands,
        is_log=is_log,
    )


def _beginnings(attempts: Sequence[TimedAttempt], high: float) -> list[Band]:
    """Return bands from each attempt's first step to the next attempt's."""
    starts: dict[int, list[str]] = {}
    for attempt in sorted(attempts, key=lambda attempt: attempt.start_step):
        starts.setdefault(attempt.start_step, []).append(str(attempt.number))
    if len(starts) < 2:
        return []
    ends = [*list(starts)[1:], high]
    return [
        Band(start, end, ", ".join(numbers))
        for (start, numbers), end in zip(starts.items(), ends, strict=True)
    ]
