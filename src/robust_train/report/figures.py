"""From a story to its charts, with captions and legends. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from robust_train.memory.samples import Sample
from robust_train.readable import duration, memory, number
from robust_train.report import plots
from robust_train.report.attempts import AttemptStory
from robust_train.report.axes import (
    Point,
    byte_ticks,
    number_ticks,
    step_ticks,
    time_ticks,
    time_ticks_between,
)
from robust_train.report.plots import Axis, Band, Bar, Chart, Glyph, Line, TimelineRow
from robust_train.report.series import Curve, DeviceMemory, Mark
from robust_train.report.story import Story
from robust_train.report.times import Span, Use
from robust_train.report.wording import OUTCOMES
from robust_train.values import MIB

LANES = {
    "oom": "OOM",
    "batch": "batch",
    "device": "device",
    "cleared": "cleared",
    "checkpoint": "saved",
    "milestone": "event",
}
"""The lanes of marks, in their order, as they are labelled."""

USES = {
    Use.USEFUL: "useful",
    Use.LOST: "lost",
    Use.WAIT: "waiting",
    Use.STARTUP: "starting up",
    Use.STOPPED: "stopped",
}
"""The uses of time for people."""

_FIGURES = (
    ("gpu_used", "whole GPU, all processes", "c3", True),
    ("reserved", "reserved", "c2", False),
    ("allocated", "allocated", "c1", True),
    ("resident", "host memory of the process", "c4", True),
)
_MOST_ROWS = 40
_MOST_CHARTS = 8
_CLOSE = 240
_LOG_RATIO = 30.0
_COLOURS = 6
_CAPTIONS = {"lr": "Learning rate"}


@dataclass(frozen=True)
class Key:
    """An entry of a legend: a style's class and its meaning."""

    style: str
    text: str


@dataclass(frozen=True)
class Figure:
    """A chart with its words: a caption, a legend and the pictures as SVG."""

    caption: str
    svg: str = field(repr=False)
    legend: tuple[Key, ...] = ()
    note: str | None = None


class Clock:
    """Seconds of a job's own time: what lies between two launches is left out."""

    def __init__(self, story: Story) -> None:
        self._start = story.started or 0.0
        self._stops = [span for span in story.spans if span.use is Use.STOPPED]
        self.end = self(story.ended or self._start)

    def __call__(self, time: float) -> float:
        """Seconds of the job until a moment."""
        away = sum(min(stop.end, time) - stop.start for stop in self._stops if time > stop.start)
        return time - self._start - away

    def axis(self) -> Axis:
        """From the job's start to its end."""
        high = max(self.end, 1e-3)
        return Axis(0.0, high, partial(time_ticks, high), "time")


def timeline_figure(story: Story) -> Figure | None:
    """Draw when each attempt ran and what its time was; None for a job without any."""
    if not story.spans:
        return None
    clock = Clock(story)
    rows = [TimelineRow("job", "", tuple(bars_of(_joined(story.spans), clock)))]
    shown = story.attempts[-_MOST_ROWS:]
    for attempt in shown:
        own = [span for span in story.spans if span.attempt == attempt.number]
        detail = f"{attempt.device}, {size_text(attempt)}"
        rows.append(TimelineRow(str(attempt.number), detail, tuple(bars_of(own, clock))))
    left_out = len(story.attempts) - len(shown)
    svg = plots.timeline("Timeline of attempts", story.sentence, rows, clock.axis())
    note = f"The first {left_out} attempts are only in the uppermost row." if left_out else None
    return Figure("Timeline", svg, use_legend(story.spans), note)


def bars_of(spans: Iterable[Span], clock: Clock | None = None) -> Iterator[Bar]:
    """Yield spans as bars of a timeline."""
    for span in spans:
        start, end = (
            (span.start, span.end) if clock is None else (clock(span.start), clock(span.end))
        )
        if span.use is not Use.STOPPED:
            whose = "" if span.attempt is None else f"attempt {span.attempt}: "
            text = f"{whose}{USES[span.use]}, {duration(span.seconds)}"
            yield Bar(start, end, span.use.value, text)


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield neighbours of one use as one span."""
    for use, group in itertools.groupby(spans, key=lambda span: span.use):
        own = list(group)
        yield Span(use, own[0].start, own[-1].end)


def use_legend(spans: Iterable[Span]) -> tuple[Key, ...]:
    """Return the legend of the uses that occur."""
    there = {span.use for span in spans} - {Use.STOPPED}
    return tuple(Key(use.value, USES[use]) for use in USES if use in there)


def size_text(attempt: AttemptStory) -> str:
    """``16 × 4``: micro-batch times accumulation, and times processes where there are several."""
    size, accumulation = attempt.batch_size, attempt.gradient_accumulation_steps
    ranks = f" × {attempt.ranks}" if attempt.ranks != 1 else ""
    return "?" if size is None else f"{size} × {accumulation or '?'}{ranks}"


def memory_figures(story: Story) -> list[Figure]:
    """Draw memory over the whole time for each device, and closely where samples are dense."""
    clock = Clock(story)
    figures = []
    for device in story.memory:
        figures.append(_memory_figure(story, device, clock, device.samples, clock.axis(), ""))
        close = _close_look(device)
        if close is not None:
            low, high = clock(close[0].time), clock(close[-1].time)
            if (high - low) < 0.4 * clock.end:
                axis = Axis(low, high, partial(time_ticks_between, low, high), "time")
                title = f", a closer look at {duration(high - low)} of attempt {close[0].attempt}"
                figures.append(_memory_figure(story, device, clock, close, axis, title))
    return figures


def _close_look(device: DeviceMemory) -> tuple[Sample, ...] | None:
    """Return the first steps of the last attempt that trained here."""
    trained = [s for s in device.samples if s.step is not None]
    if not device.sampled or not trained:
        return None
    own = [s for s in trained if s.attempt == trained[-1].attempt]
    return tuple(own[:_CLOSE]) if len(own) > _CLOSE else None


def _memory_figure(
    story: Story,
    device: DeviceMemory,
    clock: Clock,
    samples: Sequence[Sample],
    x: Axis,
    title: str,
) -> Figure:
    lines: list[Line] = []
    legend: list[Key] = []
    for name, label, style, is_area in _FIGURES:
        # the process's host memory matters little beside a GPU's
        if name == "resident" and device.device != "cpu" and lines:
            continue
        pieces = _pieces(samples, name, clock)
        if pieces:
            peak = max(value for piece in pieces for _, value in piece)
            lines.append(Line(label, style, pieces, is_area))
            legend.append(Key(style, f"{label}, at most {memory(peak)}"))
    y, level = _byte_axis(lines, device.total_bytes, close=bool(title))
    if y.low > 0:  # an area stands for an amount only where it begins at nothing
        lines = [replace(line, is_area=False) for line in lines]
    bands = _bands(story.attempts, device.device, clock)
    marks = [mark for mark in device.marks if x.low <= clock(mark.time) <= x.high]
    kinds = {mark.kind for mark in marks}
    caption = f"Memory on {'the CPU' if device.device == 'cpu' else device.device}{title}"
    svg = plots.chart(
        Chart(
            title=caption,
            description=f"{caption}: {'; '.join(key.text for key in legend)}.",
            x=x,
            y=y,
            lines=tuple(lines),
            bands=bands,
            lanes=tuple((kind, label) for kind, label in LANES.items() if kind in kinds),
            glyphs=tuple(_glyphs(marks, clock)),
            level=level,
        )
    )
    note = None
    if not device.sampled:
        note = "Only the figures that the trainer reported: there are no samples of these attempts."
    return Figure(caption, svg, tuple(legend), note)


def _byte_axis(
    lines: Sequence[Line], total: int | None, *, close: bool
) -> tuple[Axis, tuple[float, str] | None]:
    """Return the axis for memory, and where the device's total lies on it."""
    values = [value for line in lines for piece in line.pieces for _, value in piece]
    least, most = min(values, default=0.0), max(values, default=0.0)
    low, high, level = 0.0, max(1.1 * most, 1.0), None
    if close and least > 0.5 * most:
        room = max(0.15 * (most - least), MIB)
        low, high = least - room, most + room
    elif total is not None and high > 0.6 * total:
        high, level = 1.06 * max(total, most), (float(total), f"{memory(total)} in all")
    return Axis(low, high, partial(byte_ticks, low, high), "bytes"), level


def _pieces(samples: Sequence[Sample], name: str, clock: Clock) -> tuple[tuple[Point, ...], ...]:
    """Return the line of one figure, interrupted between attempts."""
    pieces = []
    for _, group in itertools.groupby(samples, key=lambda sample: sample.attempt):
        known = ((clock(s.time), value) for s in group if (value := getattr(s, name)) is not None)
        if piece := tuple(known):
            pieces.append(piece)
    return tuple(pieces)


def _bands(attempts: Sequence[AttemptStory], device: str, clock: Clock) -> tuple[Band, ...]:
    return tuple(
        Band(
            clock(a.started),
            clock(a.ended),
            f"{a.number}",
            f"attempt {a.number}: {size_text(a)}, {OUTCOMES.get(a.outcome, a.outcome)}",
        )
        for a in attempts
        if a.device == device
    )


def _glyphs(marks: Sequence[Mark], clock: Clock) -> Iterator[Glyph]:
    for mark in marks:
        at = clock(mark.time)
        yield Glyph(mark.kind, at, f"{mark.text} (attempt {mark.attempt}, {duration(at)})")


def curve_figures(story: Story) -> list[Figure]:
    """Draw losses in one chart and every other metric in its own, all attempts in each."""
    groups: dict[str, list[Curve]] = {}
    for curve in story.curves:
        groups.setdefault("loss" if "loss" in curve.name else curve.name, []).append(curve)
    # losses first, the learning rate, which everybody knows, last
    order = sorted(groups, key=lambda name: (name != "loss", name == "lr"))
    figures = [_curve_figure(name, groups[name], story.attempts) for name in order[:_MOST_CHARTS]]
    if len(order) > _MOST_CHARTS:
        figures[-1] = replace(figures[-1], note=f"Not drawn: {', '.join(order[_MOST_CHARTS:])}.")
    return figures


def _curve_figure(name: str, curves: Sequence[Curve], attempts: Sequence[AttemptStory]) -> Figure:
    names = list(dict.fromkeys(curve.name for curve in curves))
    styles = {n: f"c{1 + i % _COLOURS}" for i, n in enumerate(names)}
    lines = tuple(
        Line(
            f"{c.name}, attempt {c.attempt}" if len(attempts) > 1 else c.name,
            f"{styles[c.name]}{' lost-line' if c.lost else ''}",
            (_points(c),),
        )
        # what was lost lies behind
        for c in sorted(curves, key=lambda c: not c.lost)
    )
    last = {curve.name: curve.points[-1][1] for curve in curves}
    legend = [Key(styles[n], f"{n}, last {number(last[n])}") for n in names]
    if any(c.lost for c in curves):
        legend.append(Key("lost-line", "lost: done again, or not saved"))
    x = _step_axis(curves)
    caption = _CAPTIONS.get(name, name[:1].upper() + name[1:].replace("_", " "))
    svg = plots.chart(
        Chart(
            title=f"{caption} over steps",
            description=f"{caption} over optimizer steps: {'; '.join(k.text for k in legend)}.",
            x=x,
            y=_value_axis(curves, may_be_log=name == "loss"),
            lines=lines,
            bands=_beginnings(attempts, {c.attempt for c in curves}, x),
        )
    )
    return Figure(f"{caption} over steps", svg, tuple(legend))


def _beginnings(
    attempts: Sequence[AttemptStory], drawn: Collection[int], x: Axis
) -> tuple[Band, ...]:
    """Return bands from each attempt's first step to the next attempt's."""
    starts: dict[int, list[str]] = {}
    for attempt in attempts:
        if attempt.number in drawn:
            starts.setdefault(attempt.start_step, []).append(str(attempt.number))
    if len(starts) < 2:
        return ()
    order = sorted(starts)
    ends = [*map(float, order[1:]), x.high]
    return tuple(
        Band(float(start), end, ", ".join(starts[start]), f"attempt {', '.join(starts[start])}")
        for start, end in zip(order, ends, strict=True)
    )


def loss_of_jobs(stories: Sequence[tuple[str, Story]]) -> Figure | None:
    """Draw the loss of each job of a sweep in one chart; None where no job reported one."""
    drawn = []
    for label, story in stories:
        own = [c for c in story.curves if c.name in ("loss", "train_loss") and not c.lost]
        first = own[0].name if own else None
        drawn.append((label, [c for c in own if c.name == first]))
    curves = [curve for _, own in drawn for curve in own]
    if not curves:
        return None
    lines = [
        Line(f"job {label}", f"c{1 + index % _COLOURS}", tuple(_points(c) for c in own))
        for index, (label, own) in enumerate(drawn)
        if own
    ]
    svg = plots.chart(
        Chart(
            title="Loss of each job over steps",
            description="The loss that each job reported, over optimizer steps.",
            x=_step_axis(curves),
            y=_value_axis(curves, may_be_log=True),
            lines=tuple(lines),
        )
    )
    return Figure("Loss over steps", svg, tuple(Key(line.style, line.name) for line in lines))


def _points(curve: Curve) -> tuple[Point, ...]:
    return tuple((float(step), value) for step, value in curve.points)


def _step_axis(curves: Sequence[Curve]) -> Axis:
    steps = [step for curve in curves for step, _ in curve.points]
    low, high = float(min(0, *steps)), float(max(steps))
    high = max(high, low + 1)
    return Axis(low, high, partial(step_ticks, low, high), "step")


def _value_axis(curves: Sequence[Curve], *, may_be_log: bool) -> Axis:
    values = [value for curve in curves for _, value in curve.points]
    low, high = min(values), max(values)
    is_log = may_be_log and low > 0 and high / low > _LOG_RATIO
    if is_log:
        low, high = low / 1.2, high * 1.2
    else:
        room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        # below zero there is nothing where all values are above
        low, high = (low - room if low < 0 else max(low - room, 0.0)), high + room
    return Axis(low, high, partial(number_ticks, low, high, is_log=is_log), "number", is_log)
