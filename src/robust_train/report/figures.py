"""From a story to its charts. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from robust_train.memory.samples import Sample
from robust_train.readable import duration, memory, number, shortened
from robust_train.report.attempts import AttemptStory
from robust_train.report.charts import (
    MOST_TICKS,
    Axis,
    Band,
    Bar,
    Chart,
    Key,
    Point,
    Tick,
    Timeline,
    byte_ticks,
    labelled,
    line_of,
    number_ticks,
    step_ticks,
    time_axis,
)
from robust_train.report.series import Curve, DeviceMemory, Mark
from robust_train.report.story import Story
from robust_train.report.times import USES, Span, Use
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
"""The lanes of marks under a chart, in their order, and their labels."""

_FIGURES = (
    ("gpu_used", "whole GPU, all processes", "c3", True),
    ("reserved", "reserved", "c2", False),
    ("allocated", "allocated", "c1", True),
    ("resident", "host memory of the process", "c4", True),
)
_MOST_ROWS = 40
_MOST_CHARTS = 8
_MOST_TEXTS = 4
_LONGEST_TEXT = 160
_CLOSE = 240
_LOG_RATIO = 30.0
_COLOURS = 6
_MARK_SHARE = 0.004


class Clock:
    """Seconds of a job's own time: what lies between two launches is left out."""

    def __init__(self, story: Story) -> None:
        self._start = story.started or 0.0
        self._stops = [span for span in story.spans if span.use is Use.STOPPED]
        self.axis = time_axis(0.0, max(self(story.ended or self._start), 1e-3))

    def __call__(self, time: float) -> float:
        """Return the seconds of the job until a moment."""
        away = sum(min(stop.end, time) - stop.start for stop in self._stops if time > stop.start)
        return time - self._start - away


def timeline_of(story: Story) -> Timeline | None:
    """Draw when each attempt ran and what its time was; None for a job without any."""
    if not story.spans:
        return None
    clock = Clock(story)
    groups = [list(own) for _, own in itertools.groupby(story.spans, key=lambda span: span.use)]
    whole = [Span(own[0].use, own[0].start, own[-1].end) for own in groups]
    rows = [("job", "", _bars_of(whole, clock))]
    shown = story.attempts[-_MOST_ROWS:]
    for attempt in shown:
        own = [span for span in story.spans if span.attempt == attempt.number]
        detail = f"{attempt.device}, {size_text(attempt)}"
        rows.append((str(attempt.number), detail, _bars_of(own, clock)))
    left_out = len(story.attempts) - len(shown)
    note = f"The first {left_out} attempts are only in the uppermost row." if left_out else None
    there = {span.use for span in story.spans} - {Use.STOPPED}
    legend = [Key(use.value, text) for use, text in USES.items() if use in there]
    return Timeline(rows, clock.axis, legend, note=note)


def _bars_of(spans: Iterable[Span], clock: Clock) -> list[Bar]:
    """Return spans as bars of a timeline."""
    return [
        Bar(
            clock(span.start),
            clock(span.end),
            span.use.value,
            ("" if span.attempt is None else f"attempt {span.attempt}: ")
            + f"{USES[span.use]}, {duration(span.seconds)}",
        )
        for span in spans
        if span.use is not Use.STOPPED
    ]


def size_text(attempt: AttemptStory) -> str:
    """Return ``16 × 4``: micro-batch times accumulation, times processes if there are several."""
    size, accumulation = attempt.batch_size, attempt.gradient_accumulation_steps
    ranks = f" × {attempt.ranks}" if attempt.ranks != 1 else ""
    return "?" if size is None else f"{size} × {accumulation or '?'}{ranks}"


def memory_charts(story: Story) -> list[Chart]:
    """Draw memory over the whole time for each device, and closely where samples are dense."""
    clock = Clock(story)
    charts = []
    for device in story.memory:
        if len(device.samples) < 2 and not device.marks:  # there is nothing to see
            continue
        charts.append(_memory_chart(story, device, device.samples, clock, clock.axis))
        close = _last_samples(device)
        if close:
            low, high = clock(close[0].time), clock(close[-1].time)
            if high - low < 0.4 * clock.axis.high:
                axis = time_axis(low, high)
                charts.append(_memory_chart(story, device, close, clock, axis, is_close=True))
    return charts


def _last_samples(device: DeviceMemory) -> Sequence[Sample]:
    """Return the last samples of the last attempt that trained here; none where they are few."""
    trained = [s for s in device.samples if s.step is not None and device.sampled]
    own = [s for s in trained if s.attempt == trained[-1].attempt]
    return own[-_CLOSE:] if len(own) > _CLOSE else []


def _memory_chart(
    story: Story,
    device: DeviceMemory,
    samples: Sequence[Sample],
    clock: Clock,
    x: Axis,
    *,
    is_close: bool = False,
) -> Chart:
    pieces = {name: _pieces(samples, name, clock) for name, *_ in _FIGURES}
    if device.device != "cpu" and any(pieces[name] for name, *_ in _FIGURES[:-1]):
        pieces["resident"] = []  # host memory matters little beside a GPU's
    values = [y for own in pieces.values() for piece in own for _, y in piece]
    y, level = _byte_axis(values, device.most("gpu_total"), is_close=is_close)
    lines, legend = [], []
    for name, label, style, is_area in _FIGURES:
        if pieces[name]:
            # an area shows an amount only if it begins at nothing
            lines.append(line_of(label, style, pieces[name], x, y, is_area=is_area and y.low == 0))
            peak = max(value for piece in pieces[name] for _, value in piece)
            if name == ("resident" if device.device == "cpu" else "allocated") and not is_close:
                # samples miss what lies between them; an attempt reports its true peak
                own = (a for a in story.attempts if a.device == device.device)
                peak = max([peak, *(a.peak_memory_bytes or 0 for a in own)])
            legend.append(Key(style, f"{label}, at most {memory(peak)}"))
    caption = f"Memory on {'the CPU' if device.device == 'cpu' else device.device}"
    if is_close:
        span = duration(x.high - x.low)
        caption += f", a closer look at {span} of attempt {samples[0].attempt}"
    note = None
    if not device.sampled:
        note = "Only the figures that the trainer reported: there are no samples of these attempts."
    bands = [
        Band(
            clock(a.started),
            clock(a.ended),
            str(a.number),
            f"attempt {a.number}: {size_text(a)}, {OUTCOMES.get(a.outcome, a.outcome)}",
        )
        for a in story.attempts
        if a.device == device.device
    ]
    lanes = _lanes(device.marks, clock, x)
    return Chart(caption, x, y, lines, legend, labelled(bands, x), lanes, level, note)


def _byte_axis(
    values: Sequence[float], total: int | None, *, is_close: bool
) -> tuple[Axis, Tick | None]:
    """Return the axis for memory, and where the device's total lies on it."""
    least, most = min(values, default=0.0), max(values, default=0.0)
    low, high, level = 0.0, max(1.1 * most, 1.0), None
    if is_close and least > 0.5 * most:
        room = max(0.15 * (most - least), MIB)
        low, high = least - room, most + room
    elif total is not None and high > 0.6 * total:
        high, level = 1.06 * max(total, most), Tick(total, f"{memory(total)} in all")
    return Axis(low, high, byte_ticks(low, high, 5), "bytes"), level


def _pieces(samples: Sequence[Sample], name: str, clock: Clock) -> list[list[Point]]:
    """Return the points of one figure, interrupted between attempts."""
    groups = itertools.groupby(samples, key=lambda sample: sample.attempt)
    pieces = (
        [(clock(s.time), value) for s in own if (value := getattr(s, name)) is not None]
        for _, own in groups
    )
    return [piece for piece in pieces if piece]


def _lanes(marks: Iterable[Mark], clock: Clock, x: Axis) -> dict[str, list[tuple[str, float, str]]]:
    """Return the marks within the axis by lane; those that would overlap become one."""
    lanes: dict[str, dict[int, list[str]]] = {kind: {} for kind in LANES}
    for mark in marks:
        at = clock(mark.time)
        if x.low <= at <= x.high:
            text = shortened(f"{mark.text} (attempt {mark.attempt}, {duration(at)})", _LONGEST_TEXT)
            lanes[mark.kind].setdefault(round(x.share(at) / _MARK_SHARE), []).append(text)
    for texts in (texts for lane in lanes.values() for texts in lane.values()):
        if len(texts) > _MOST_TEXTS:
            texts[_MOST_TEXTS:] = [f"… {len(texts)} in all"]
    return {
        LANES[kind]: [
            (kind, min(100 * _MARK_SHARE * column, 100.0), "\n".join(texts))
            for column, texts in lane.items()
        ]
        for kind, lane in lanes.items()
        if lane
    }


def curve_charts(story: Story) -> list[Chart]:
    """Draw losses in one chart and every other metric in its own, all attempts in each."""
    groups: dict[str, list[Curve]] = {}
    drawn = {curve.name for curve in story.curves if len(curve.points) > 1}
    for curve in (curve for curve in story.curves if curve.name in drawn):
        groups.setdefault("loss" if "loss" in curve.name else curve.name, []).append(curve)
    # losses first, the learning rate, which everybody knows, last
    order = sorted(groups, key=lambda name: (name != "loss", name == "lr"))
    charts = [_curve_chart(name, groups[name], story.attempts) for name in order[:_MOST_CHARTS]]
    if len(order) > _MOST_CHARTS:
        charts[-1] = replace(charts[-1], note=f"Not drawn: {', '.join(order[_MOST_CHARTS:])}.")
    return charts


def reported_once(story: Story) -> list[tuple[str, str]]:
    """Return metrics of a single value, of which there is nothing to draw."""
    values = {curve.name: curve.points for curve in story.curves}
    several = {curve.name for curve in story.curves if len(curve.points) > 1}
    return [(name, number(own[-1][1])) for name, own in values.items() if name not in several]


def _curve_chart(name: str, curves: Sequence[Curve], attempts: Sequence[AttemptStory]) -> Chart:
    last = {curve.name: curve.points[-1][1] for curve in curves}
    styles = {name: f"c{1 + i % _COLOURS}" for i, name in enumerate(last)}
    x, y = _curve_axes(curves, may_be_log=name == "loss")
    lines = [
        line_of(
            f"{c.name}, attempt {c.attempt}" if len(attempts) > 1 else c.name,
            f"{styles[c.name]}{' lost-line' if c.lost else ''}",
            [c.points],
            x,
            y,
        )
        for c in sorted(curves, key=lambda c: not c.lost)  # what was lost lies behind
    ]
    legend = [Key(styles[n], f"{n}, last {number(value)}") for n, value in last.items()]
    if any(c.lost for c in curves):
        legend.append(Key("lost-line", "lost: done again, or not saved"))
    caption = "Learning rate" if name == "lr" else name[:1].upper() + name[1:].replace("_", " ")
    bands = _beginnings(attempts, {c.attempt for c in curves}, x)
    return Chart(f"{caption} over steps", x, y, lines, legend, labelled(bands, x))


def _beginnings(attempts: Sequence[AttemptStory], drawn: Collection[int], x: Axis) -> list[Band]:
    """Return bands from each attempt's first step to the next attempt's."""
    starts: dict[int, list[str]] = {}
    for attempt in sorted(attempts, key=lambda attempt: attempt.start_step):
        if attempt.number in drawn:
            starts.setdefault(attempt.start_step, []).append(str(attempt.number))
    if len(starts) < 2:
        return []
    ends = [*list(starts)[1:], x.high]
    return [
        Band(start, end, ", ".join(numbers), f"attempt {', '.join(numbers)}")
        for (start, numbers), end in zip(starts.items(), ends, strict=True)
    ]


def loss_of_jobs(stories: Sequence[tuple[str, Story]]) -> Chart | None:
    """Draw the loss of each job of a sweep in one chart; None if no job reported one."""
    jobs: dict[str, list[Curve]] = {}
    for label, story in stories:
        own = [c for c in story.curves if c.name in ("loss", "train_loss") and not c.lost]
        if own:
            jobs[label] = [c for c in own if c.name == own[0].name]
    if not jobs:
        return None
    x, y = _curve_axes([curve for own in jobs.values() for curve in own], may_be_log=True)
    lines = [
        line_of(f"job {label}", f"c{1 + index % _COLOURS}", [c.points for c in own], x, y)
        for index, (label, own) in enumerate(jobs.items())
    ]
    return Chart("Loss over steps", x, y, lines, [Key(line.style, line.name) for line in lines])


def _curve_axes(curves: Sequence[Curve], *, may_be_log: bool) -> tuple[Axis, Axis]:
    """Return the axes of steps and of values."""
    steps = [step for curve in curves for step, _ in curve.points]
    first, last = min(0, *steps), max(*steps, 1)
    x = Axis(first, last, step_ticks(first, last, MOST_TICKS), "step")
    values = [value for curve in curves for _, value in curve.points]
    low, high = min(values), max(values)
    is_log = may_be_log and low > 0 and high / low > _LOG_RATIO
    if is_log:
        low, high = low / 1.2, high * 1.2
    else:
        room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        # below zero there is nothing if all values are above
        low, high = (low - room if low < 0 else max(low - room, 0.0)), high + room
    return x, Axis(low, high, number_ticks(low, high, 5, is_log=is_log), "number", is_log)
