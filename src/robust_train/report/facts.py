"""Computes the facts of a job's report: the uses of its time, memory over time, curves, events.

`story.story_of` puts them into a `Story`: in the launcher at a job's end, in a sweep's process, or
in the command ``robust-train report``. It reads no files.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from robust_train.files import strict_json
from robust_train.folder.memory_samples import Sample
from robust_train.model import events
from robust_train.model.attempt import Attempt
from robust_train.model.failure import MEMORY_FAILURES
from robust_train.model.json import fields_as_json, finite
from robust_train.model.spec import Speed
from robust_train.readable import memory
from robust_train.report.sources import Entry, Launch, TimedAttempt

OOM = frozenset(kind.value for kind in MEMORY_FAILURES)  # outcomes of attempts
_LONGEST_FIELDS = 120  # characters of a user event's fields
SCHEMA = 1  # of `Story.as_json`


Use = Literal["useful", "lost", "wait", "startup", "stopped"]

USES: dict[Use, str] = {
    "useful": "useful",
    "lost": "lost",
    "wait": "waiting",
    "startup": "starting up",
    # Between two launches in the same run folder, which is not part of the wall time.
    "stopped": "stopped",
}
"""The uses of a job's time, each with its words. ``docs/report.md`` has the definitions."""


@dataclass(frozen=True)
class Span:
    """A stretch of time, in seconds since the epoch, and the attempt it belongs to (or None)."""

    use: Use
    start: float
    end: float
    attempt: int | None = None

    @property
    def seconds(self) -> float:
        """The length of the span in seconds."""
        return self.end - self.start


@dataclass(frozen=True)
class Mark:
    """Something that happened at a moment of an attempt."""

    kind: str  # oom, batch, device, cleared, checkpoint or milestone
    time: float  # seconds since the epoch
    text: str
    attempt: int
    device: str


@dataclass(frozen=True)
class DeviceMemory:
    """The samples of memory on a device, the oldest first."""

    device: str
    samples: tuple[Sample, ...]

    def most(self, name: str) -> int:
        """Return the highest value of a figure, 0 if it is unknown."""
        return max(getattr(sample, name) or 0 for sample in self.samples)


@dataclass(frozen=True)
class Curve:
    """The values of a metric that an attempt reported."""

    name: str
    attempt: int
    points: tuple[tuple[int, float], ...]  # (step, value)
    lost: bool = False  # a later attempt repeated these steps, or no checkpoint has them


@dataclass(frozen=True)
class Advice:
    """A finding about the job, advice, and overrides for the next run."""

    finding: str
    steps: tuple[str, ...] = ()
    overrides: str | None = None


@dataclass(frozen=True)
class Story:
    """The story of a job. Attempts, launches, spans and marks are in order, the oldest first."""

    name: str
    folder: str
    files: tuple[str, ...]
    # A sentence for each file that is missing or damaged.
    gaps: tuple[str, ...]
    # The job (`trainer`, `model`, `dataset`, `overrides`, `command`) and its environment
    # (`git commit`, `torch`, `cuda`, `driver`, `gpu` …).
    about: Mapping[str, str]
    # The status in `summary.json`. `unfinished` if no end is recorded, because the job still runs
    # or its process died. `empty` if nothing is recorded.
    status: str
    result: Any
    # The seconds until the job's end, or until its last record.
    took: float
    # The seconds of each use, by name. `wall` is their sum without `stopped`.
    seconds: dict[str, float]
    # The same time, divided further by `goodput_of`.
    parts: dict[str, float]
    attempts: tuple[TimedAttempt, ...]
    launches: tuple[Launch, ...]
    spans: tuple[Span, ...]
    memory: tuple[DeviceMemory, ...]
    curves: tuple[Curve, ...]
    marks: tuple[Mark, ...]
    # How memory developed in the last attempt, None if unknown.
    stability: str | None
    sentence: str = ""  # a summary
    # Advice for the next run, the most promising first.
    advice: tuple[Advice, ...] = ()

    @property
    def goodput(self) -> float | None:
        """The useful share of the wall time, None if no time passed."""
        return share_of(self.parts)

    @property
    def peak_memory_bytes(self) -> int | None:
        """The peak of all attempts on the device that was used last, None if unknown."""
        peaks = []
        for attempt in self.attempts:
            is_on_last_device = attempt.device == self.attempts[-1].device
            if is_on_last_device and attempt.peak_memory_bytes:
                peaks.append(attempt.peak_memory_bytes)
        return max(peaks, default=None)

    def as_json(self) -> Any:
        """Return the story in JSON's types. The schema comes first."""
        return strict_json({"schema": SCHEMA, **fields_as_json(self)})


# --- time -----------------------------------------------------------------------------------------


def spans_of(
    launches: Sequence[Launch], attempts: Sequence[TimedAttempt], kept: Mapping[int, float]
) -> tuple[Span, ...]:
    """Divide all of a job's time into spans by use, in order, without gaps or overlaps.

    ``kept`` is the result of `kept_steps`.
    """
    starts = [launch.start for launch in launches]
    spans: list[Span] = []
    now = starts[0] if starts else 0.0
    for number, launch in enumerate(launches, start=1):
        attempts_of_launch = [a for a in attempts if bisect_right(starts, a.started) == number]
        pause = Span("stopped", now, launch.start)
        for span in (pause, *_spans_of_launch(launch, attempts_of_launch, kept)):
            # In a damaged journal, two attempts may overlap.
            if span.end > max(span.start, now):
                spans.append(replace(span, start=max(span.start, now)))
                now = span.end
    return tuple(spans)


def seconds_of(spans: Iterable[Span], use: Use, attempt: int | None = None) -> float:
    """Return the seconds of all spans of a use, or only of the spans of an attempt."""
    return math.fsum(
        span.seconds for span in spans if use == span.use and attempt in (None, span.attempt)
    )


def totals(spans: Sequence[Span]) -> dict[str, float]:
    """Return the seconds of each use by its name, and their sum without ``stopped`` as ``wall``."""
    seconds: dict[str, float] = {use: seconds_of(spans, use) for use in USES}
    wall = math.fsum(span.seconds for span in spans if span.use != "stopped")
    return {**seconds, "wall": wall}


def goodput_of(spans: Sequence[Span], attempts: Sequence[TimedAttempt]) -> dict[str, float]:
    """Divide the wall time into parts, in seconds. ``docs/report.md`` has the definitions."""
    parts = {
        "useful": seconds_of(spans, "useful"),
        "repeated": seconds_of(spans, "lost"),
        "skipped": 0.0,
        "waiting": seconds_of(spans, "wait"),
        "starting": seconds_of(spans, "startup"),
        "saving": 0.0,
        "stalled": 0.0,
    }
    for attempt in attempts:
        useful = seconds_of(spans, "useful", attempt.number)
        saving = min(attempt.noted("saving_seconds", 0.0), useful)
        speed = speed_of(attempt)
        seconds_per_step = speed[0].seconds_per_step if speed else 0.0
        updates = attempt.noted("skipped_updates", 0)
        skipped = min(updates * seconds_per_step, useful - saving)
        lost = seconds_of(spans, "lost", attempt.number)
        stalled = min(attempt.noted("stalled_seconds", 0.0), lost)
        parts["saving"] += saving
        parts["skipped"] += skipped
        parts["useful"] -= saving + skipped
        parts["stalled"] += stalled
        parts["repeated"] -= stalled
    return parts


def speed_of(attempt: Attempt) -> tuple[Speed, ...]:
    """Return the speed of each rank that measured it."""
    return attempt.noted("speed", ())


def share_of(parts: Mapping[str, float]) -> float | None:
    """Return the useful share of the time, called goodput, or None if no time passed."""
    wall = sum(parts.values())
    return parts["useful"] / wall if wall > 0 else None


def kept_steps(status: str, attempts: Sequence[TimedAttempt]) -> dict[int, float]:
    """Return the last step of each attempt that was kept, by the attempt's number.

    A step is kept if no later attempt repeated it. If the job did not complete, steps after its
    last checkpoint are not kept either.
    """
    kept: dict[int, float] = {}
    bound = math.inf
    if status != "completed":
        saved_steps = [step for attempt in attempts for step, _ in attempt.checkpoints]
        bound = max(saved_steps, default=0)
    for attempt in reversed(attempts):
        kept[attempt.number] = math.inf if attempt.outcome == "completed" else bound
        bound = min(bound, attempt.start_step)
    return kept


def _spans_of_launch(
    launch: Launch, attempts: Sequence[TimedAttempt], kept: Mapping[int, float]
) -> Iterator[Span]:
    """Yield the spans of a launch: until it has a device, then before, in and after attempts."""
    now = launch.start
    use_of_gap: Use = "startup"
    if launch.device_acquired is not None:
        wait_start = max(launch.device_acquired - launch.device_wait_seconds, now)
        yield Span("startup", now, wait_start)
        yield Span("wait", wait_start, launch.device_acquired)
        now = launch.device_acquired
    elif not attempts:
        use_of_gap = "wait"
    for attempt in attempts:
        yield Span(use_of_gap, now, attempt.started, attempt.number)
        yield from _spans_of_attempt(attempt, kept[attempt.number])
        now = attempt.ended
        use_of_gap = "wait"
    if attempts and not attempts[-1].is_retried:
        use_of_gap = "startup"
    yield Span(use_of_gap, now, launch.end)


def _spans_of_attempt(attempt: TimedAttempt, kept: float) -> Iterator[Span]:
    """Yield an attempt's startup, its useful time until the last kept step, and its lost time."""
    number = attempt.number
    training_start = attempt.training_began
    useful_end = _time_of_last_kept_step(attempt, kept)
    if attempt.outcome == "completed":
        useful_end = attempt.ended
        if training_start is None:
            # A trainer that never reports its start counts as training all the time.
            training_start = attempt.started
    if training_start is None or useful_end is None:
        training_start = attempt.started
        useful_end = attempt.started
    yield Span("startup", attempt.started, training_start, number)
    yield Span("useful", training_start, useful_end, number)
    yield Span("lost", useful_end, attempt.ended, number)


def _time_of_last_kept_step(attempt: TimedAttempt, kept: float) -> float | None:
    """Return when the last kept step was saved or done, or None if no step was kept."""
    if kept <= attempt.start_step:
        return None
    saved = [time for step, time in attempt.checkpoints if step <= kept]
    done = [time for step, time in attempt.progress if step <= kept]
    return max(saved or done, default=None)


# --- memory, scalars, marks -----------------------------------------------------------------------


def memory_of(samples: Iterable[Sample]) -> tuple[DeviceMemory, ...]:
    """Return memory over time for each device, in the order in which the devices were used."""
    by_device: dict[str, list[Sample]] = {}
    for sample in samples:
        by_device.setdefault(sample.device, []).append(sample)
    return tuple(DeviceMemory(device, tuple(each)) for device, each in by_device.items())


def curves_of(entries: Sequence[Entry], kept: Mapping[int, float]) -> tuple[Curve, ...]:
    """Return a curve of each reported metric and attempt, and another of its lost steps."""
    points: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for entry in entries:
        event = entry.event
        number = entry.attempt
        if isinstance(event, (events.Progress, events.EpochEnded)) and number in kept:
            for name, metric in event.metrics.items():
                value = finite(metric)
                if value is not None and event.step is not None:
                    points.setdefault((name, number), []).append((event.step, value))
    curves = []
    for (name, attempt), curve in points.items():
        kept_points = [point for point in curve if point[0] <= kept[attempt]]
        lost_points = curve[len(kept_points) :]
        if kept_points:
            curves.append(Curve(name, attempt, tuple(kept_points)))
        if lost_points:
            # The lost curve starts where the kept curve ends, so that the lines meet.
            points_to_draw = kept_points[-1:] + lost_points
            curves.append(Curve(name, attempt, tuple(points_to_draw), lost=True))
    return tuple(curves)


def marks_of(entries: Sequence[Entry], attempts: Sequence[TimedAttempt]) -> tuple[Mark, ...]:
    """Return the marks of a journal, the oldest first."""
    by_number = {attempt.number: attempt for attempt in attempts}
    marks = []
    for entry in entries:
        if entry.attempt in by_number:
            for kind, text in _describe_event(entry.event):
                marks.append((kind, entry.time, text, by_number[entry.attempt]))
    for before, after in itertools.pairwise(attempts):
        if before.spec.device_key != after.spec.device_key:
            text = f"{before.device} → {after.device}"
            marks.append(("device", after.started, text, after))
        if before.batch_size != after.batch_size:
            text = f"micro-batch {before.batch_size} → {after.batch_size}"
            marks.append(("batch", after.started, text, after))
    for attempt in attempts:
        if attempt.outcome in OOM:
            text = f"attempt {attempt.number}: {attempt.message or 'out of memory'}"
            marks.append(("oom", attempt.ended, text, attempt))
    return tuple(
        Mark(kind, time, text, attempt.number, attempt.device)
        for kind, time, text, attempt in sorted(marks, key=lambda change: change[1])
    )


def _describe_event(event: events.Event) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each mark of an event."""
    match event:
        case events.MicroBatchChanged(step=step, before=before, after=after):
            if event.kind in MEMORY_FAILURES:
                yield "oom", f"inside a step at step {step}: {event.reason}"
            yield "batch", f"micro-batch {before} → {after} at step {step}"
        case events.MicroBatchExhausted(step=step, reason=reason):
            yield "oom", f"inside a step at step {step}: {reason}"
        case events.BatchSizeFound(batch_size=size):
            yield ("batch", f"probes found micro-batch {size or 'that fits: none'}")
        case events.CheckpointSaved(step=step):
            at = "" if step is None else f" at step {step}"
            yield "checkpoint", f"checkpoint{at}"
        case events.MemoryReported(milestone=milestone) if not event.rank:
            yield "milestone", milestone
        case events.MemoryCleared(reason=reason, returned_bytes=returned):
            yield ("cleared", f"memory cleared ({reason}): {memory(returned)} returned")
        case events.UserEvent(event_name=name, fields=fields):
            values = ", ".join(f"{key}={value}" for key, value in fields.items())
            text = f"{name}: {values[:_LONGEST_FIELDS]}" if values else name
            yield "milestone", text
