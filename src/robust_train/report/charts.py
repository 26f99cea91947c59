"""The charts and the timeline of a report, as data that the page's template and script draw. Pure.

``templates/report.js`` hands a chart's lines to uPlot; legends, marks and the timeline are HTML.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from robust_train.memory.samples import Sample
from robust_train.readable import duration, memory, number, shortened
from robust_train.report.attempts import TimedAttempt
from robust_train.report.series import Curve, DeviceMemory, Mark
from robust_train.report.story import Story
from robust_train.report.times import USES, Span, Use

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

_MEMORY_LINES = (
    ("gpu_used", "whole GPU, all processes", "c3", True),
    ("reserved", "reserved", "c2", False),
    ("allocated", "allocated", "c1", True),
    ("resident", "host memory of the process", "c4", True),
)
_MOST_ROWS = 40
_MOST_CHARTS = 8
_MOST_TEXTS = 4
_LONGEST_TEXT = 160
_LOG_RATIO = 30.0
_COLOURS = 6
_MARKS_PER_LANE = 250
_MOST_TICKS = 10
_ROUND_SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800)
_ROUND_HOURS = (1, 2, 3, 6, 12, 24)


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


@dataclass(frozen=True)
class Band:
    """A stretch of the x axis with its label above, such as an attempt."""

    start: float
    end: float
    label: str


@dataclass(frozen=True)
class Plot:
    """What the script draws: lines over an x axis from ``low`` to ``high``."""

    x: Literal["time", "step"]
    y: Literal["bytes", "number"]
    low: float
    high: float
    lines: Sequence[Line]
    bands: Sequence[Band] = ()
    level: float | None = None  # a horizontal line
    is_log: bool = False


@dataclass(frozen=True)
class DrawnMark:
    """A mark in a lane, in percent of the x axis."""

    kind: str
    left: float
    text: str


@dataclass(frozen=True)
class Chart:
    """A plot with its caption, its legend, and lanes of marks by label."""

    caption: str
    plot: Plot
    legend: Sequence[Key]
    lanes: Sequence[tuple[str, Sequence[DrawnMark]]] = ()
    note: str | None = None


@dataclass(frozen=True)
class Bar:
    """A stretch of a timeline's row, in percent."""

    left: float
    width: float
    style: str
    text: str


@dataclass(frozen=True)
class Row:
    """A row of a timeline."""

    label: str
    detail: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Timeline:
    """Rows of bars over one axis of time, whose ticks are (percent, text)."""

    rows: Sequence[Row]
    ticks: Sequence[tuple[float, str]]
    legend: Sequence[Key]
    note: str | None = None


class Clock:
    """Seconds of a job's own time, which stops between two launches."""

    def __init__(self, story: Story) -> None:
        self._start = story.started or 0.0
        self._stops = [span for span in story.spans if span.use is Use.STOPPED]
        self.seconds = max(self(story.ended or self._start), 1e-3)

    def __call__(self, time: float) -> float:
        """Return the seconds of the job until a moment."""
        away = sum(
            min(stop.end, time) - stop.start
            for stop in self._stops
            if time > stop.start
        )
        return time - self._start - away

    def percent(self, seconds: float) -> float:
        """Return a length of time in percent of the whole."""
        return 100 * min(max(seconds / self.seconds, 0.0), 1.0)


def timeline_of(story: Story) -> Timeline | None:
    """Draw when each attempt ran and how its time was spent; None if no time passed."""
    if not story.spans:
        return None
    clock = Clock(story)
    groups = [
        list(own)
        for _, own in itertools.groupby(story.spans, key=lambda span: span.use)
    ]
    whole = [Span(own[0].use, own[0].start, own[-1].end) for own in groups]
    rows = [Row("job", "", _bars(whole, clock))]
    shown = story.attempts[-_MOST_ROWS:]
    for attempt in shown:
        own = [span for span in story.spans if span.attempt == attempt.number]
        detail = f"{attempt.device}, {size_text(attempt)}"
        rows.append(Row(str(attempt.number), detail, _bars(own, clock)))
    left_out = len(story.attempts) - len(shown)
    used = {span.use for span in story.spans} - {Use.STOPPED}
    return Timeline(
        rows,
        ticks=[(clock.percent(at), _tick(at)) for at in ticks(clock.seconds)],
        legend=[Key(use.value, text) for use, text in USES.items() if use in used],
        note=f"The first {left_out} attempts are only in the top row."
        if left_out
        else None,
    )


def ticks(seconds: float) -> list[float]:
    """Return round moments from 0 to at most ``seconds``."""
    steps = (*_ROUND_SECONDS, *(3600 * hours for hours in _ROUND_HOURS))
    days = 86400 * math.ceil(seconds / _MOST_TICKS / 86400)
    step = next((step for step in steps if seconds / step <= _MOST_TICKS), days)
    return [step * index for index in range(math.floor(seconds / step) + 1)]


def _tick(seconds: float) -> str:
    return duration(seconds).replace(".0 s", " s") if seconds else "0"


def _bars(spans: Iterable[Span], clock: Clock) -> list[Bar]:
    bars = []
    for span in spans:
        if span.use is not Use.STOPPED:
            left = clock.percent(clock(span.start))
            whose = "" if span.attempt is None else f"attempt {span.attempt}: "
            text = f"{whose}{USES[span.use]}, {duration(span.seconds)}"
            bars.append(
                Bar(left, clock.percent(clock(span.end)) - left, span.use.value, text)
            )
    return bars


def size_text(attempt: TimedAttempt) -> str:
    """Return ``16 × 4``: micro-batch times accumulation, times processes if there are several."""
    size, accumulation = attempt.batch_size, attempt.spec.gradient_accumulation_steps
    ranks = f" × {attempt.spec.ranks}" if attempt.spec.ranks != 1 else ""
    return "?" if size is None else f"{size} × {accumulation or '?'}{ranks}"


def memory_charts(story: Story) -> list[Chart]:
    """Draw memory over time for each device that has more than one sample."""
    clock = Clock(story)
    return [
        _memory_chart(story, device, clock)
        for device in story.memory
        if len(device.samples) > 1 or device.marks
    ]


def _memory_chart(story: Story, device: DeviceMemory, clock: Clock) -> Chart:
    is_cpu = device.device == "cpu"
    peaks = {name: device.most(name) for name, *_ in _MEMORY_LINES}
    if not is_cpu and any(peaks[name] is not None for name, *_ in _MEMORY_LINES[:-1]):
        peaks["resident"] = None  # host memory matters little beside a GPU's
    lines, legend = [], []
    for name, label, style, is_area in _MEMORY_LINES:
        peak = peaks[name]
        if peak is None:
            continue
        lines.append(
            _memory_line(device.samples, name, label, style, clock, is_area=is_area)
        )
        if name == ("resident" if is_cpu else "allocated"):
            # the peak that an attempt reports may lie between two samples
            own = (a for a in story.attempts if a.device == device.device)
            peak = max([peak, *(a.peak_memory_bytes or 0 for a in own)])
        legend.append(Key(style, f"{label}, at most {memory(peak)}"))
    total, most = device.most("gpu_total"), max(filter(None, peaks.values()), default=0)
    level = total if total is not None and most > 0.5 * total else None
    if level is not None:
        legend.append(Key("level", f"{memory(level)} in all"))
    bands = [
        Band(clock(a.started), clock(a.ended), str(a.number)) for a in story.attempts
    ]
    note = None
    if not device.sampled:
        note = "Only what the trainer reported: these attempts have no samples."
    return Chart(
        f"Memory on {'the CPU' if is_cpu else device.device}",
        Plot("time", "bytes", 0.0, clock.seconds, lines, bands, level),
        legend,
        _lanes(device.marks, clock),
        note,
    )


def _memory_line(
    samples: Sequence[Sample],
    name: str,
    label: str,
    style: str,
    clock: Clock,
    *,
    is_area: bool,
) -> Line:
    """Return the line of one figure, interrupted between attempts."""
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
    return Line(label, style, x, y, is_area)


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


def _lanes(
    marks: Iterable[Mark],
    clock: Clock,
) -> list[tuple[str, list[DrawnMark]]]:
    """Return the marks by lane; marks that would overlap become one."""
    lanes: dict[str, dict[int, list[str]]] = {kind: {} for kind in LANES}
    for mark in marks:
        at = clock(mark.time)
        column = round(_MARKS_PER_LANE * clock.percent(at) / 100)
        text = shortened(
            f"{mark.text} (attempt {mark.attempt}, {duration(at)})", _LONGEST_TEXT
        )
        lanes[mark.kind].setdefault(column, []).append(text)
    return [
        (
            LANES[kind],
            [
                DrawnMark(kind, 100 * column / _MARKS_PER_LANE, _joined(texts))
                for column, texts in lane.items()
            ],
        )
        for kind, lane in lanes.items()
        if lane
    ]


def _joined(texts: Sequence[str]) -> str:
    if len(texts) > _MOST_TEXTS:
        texts = [*texts[:_MOST_TEXTS], f"… {len(texts)} in all"]
    return "\n".join(texts)


def curve_charts(story: Story) -> list[Chart]:
    """Draw the losses in one chart and every other metric in its own."""
    groups: dict[str, list[Curve]] = {}
    drawn = {curve.name for curve in story.curves if len(curve.points) > 1}
    for curve in (curve for curve in story.curves if curve.name in drawn):
        groups.setdefault("loss" if "loss" in curve.name else curve.name, []).append(
            curve
        )
    # losses first, and the learning rate, which follows a known schedule, last
    order = sorted(groups, key=lambda name: (name != "loss", name == "lr"))
    charts = [
        _curve_chart(name, groups[name], story.attempts)
        for name in order[:_MOST_CHARTS]
    ]
    if len(order) > _MOST_CHARTS:
        charts[-1] = replace(
            charts[-1], note=f"Not drawn: {', '.join(order[_MOST_CHARTS:])}."
        )
    return charts


def reported_once(story: Story) -> list[tuple[str, str]]:
    """Return the metrics that have a single value, too few for a curve."""
    values = {curve.name: curve.points for curve in story.curves}
    several = {curve.name for curve in story.curves if len(curve.points) > 1}
    return [
        (name, number(own[-1][1]))
        for name, own in values.items()
        if name not in several
    ]


def _curve_chart(
    name: str, curves: Sequence[Curve], attempts: Sequence[TimedAttempt]
) -> Chart:
    last = {curve.name: curve.points[-1][1] for curve in curves}
    styles = dict(zip(last, _styles(), strict=False))
    lines = [
        _curve_line(
            f"{curve.name}, attempt {curve.attempt}"
            if len(attempts) > 1
            else curve.name,
            styles[curve.name],
            curve,
        )
        for curve in sorted(
            curves, key=lambda curve: not curve.lost
        )  # lost steps lie behind
    ]
    legend = [
        Key(styles[one], f"{one}, last {number(value)}") for one, value in last.items()
    ]
    if any(curve.lost for curve in curves):
        legend.append(Key("lost-line", "lost: done again, or not saved"))
    plot = _plot_over_steps(lines, may_be_log=name == "loss")
    bands = _beginnings(attempts, {curve.attempt for curve in curves}, plot.high)
    caption = (
        "Learning rate"
        if name == "lr"
        else name[:1].upper() + name[1:].replace("_", " ")
    )
    return Chart(f"{caption} over steps", replace(plot, bands=bands), legend)


def _styles() -> Iterator[str]:
    return itertools.cycle(f"c{index}" for index in range(1, _COLOURS + 1))


def _curve_line(name: str, style: str, curve: Curve) -> Line:
    points = thinned(curve.points)
    x, y = [step for step, _ in points], [value for _, value in points]
    return Line(name, style, x, y, is_lost=curve.lost)


def _beginnings(
    attempts: Sequence[TimedAttempt], drawn: Collection[int], high: float
) -> list[Band]:
    """Return bands from each attempt's first step to the next attempt's."""
    starts: dict[int, list[str]] = {}
    for attempt in sorted(attempts, key=lambda attempt: attempt.start_step):
        if attempt.number in drawn:
            starts.setdefault(attempt.start_step, []).append(str(attempt.number))
    if len(starts) < 2:
        return []
    ends = [*list(starts)[1:], high]
    return [
        Band(start, end, ", ".join(numbers))
        for (start, numbers), end in zip(starts.items(), ends, strict=True)
    ]


def loss_of_jobs(stories: Sequence[tuple[str, Story]]) -> Chart | None:
    """Draw the loss of each job of a sweep in one chart; None if no job reported one."""
    lines, legend = [], []
    styles = _styles()
    for label, story in stories:
        own = [
            c for c in story.curves if c.name in ("loss", "train_loss") and not c.lost
        ]
        if own:
            key = Key(next(styles), f"job {label}")
            legend.append(key)
            same = (curve for curve in own if curve.name == own[0].name)
            lines += [_curve_line(key.text, key.style, curve) for curve in same]
    if not lines:
        return None
    return Chart("Loss over steps", _plot_over_steps(lines, may_be_log=True), legend)


def _plot_over_steps(lines: Sequence[Line], *, may_be_log: bool) -> Plot:
    values = [value for line in lines for value in line.y if value is not None]
    low, high = min(values), max(values)
    is_log = may_be_log and low > 0 and high / low > _LOG_RATIO
    steps = [step for line in lines for step in line.x]
    return Plot("step", "number", min(0, *steps), max(1, *steps), lines, is_log=is_log)
