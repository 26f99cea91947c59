"""The facts of a job: the uses of its time, memory over time, scalars, events. Pure.

:func:`.story.story_of` makes a `Story` of them for the report: in the launcher at a job's end, in
the process of a sweep, or in ``robust-train report``.
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

OOM = frozenset(kind.value for kind in MEMORY_FAILURES)
_LONGEST_FIELDS = 120
SCHEMA = 1


Use = Literal["useful", "lost", "wait", "startup", "stopped"]

USES: dict[Use, str] = {
    "useful": "useful",
    "lost": "lost",
    "wait": "waiting",
    "startup": "starting up",
    # between two launches in the same run folder; not part of the wall time
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
        """Its length."""
        return self.end - self.start


@dataclass(frozen=True)
class Mark:
    """Something that happened at a moment (``time``: seconds since the epoch). ``kind`` is ``oom``,
    ``batch``, ``device``, ``cleared``, ``checkpoint`` or ``milestone``."""

    kind: str
    time: float
    text: str
    attempt: int
    device: str


@dataclass(frozen=True)
class DeviceMemory:
    """Samples of memory on a device, oldest first."""

    device: str
    samples: tuple[Sample, ...]

    def most(self, name: str) -> int:
        """Return the highest value of a figure, 0 if it is unknown."""
        return max(getattr(sample, name) or 0 for sample in self.samples)


@dataclass(frozen=True)
class Curve:
    """A scalar over steps, as (step, value) that an attempt reported. It is ``lost`` if a later
    attempt repeated these steps, or no checkpoint holds them."""

    name: str
    attempt: int
    points: tuple[tuple[int, float], ...]
    lost: bool = False


@dataclass(frozen=True)
class Advice:
    """One thing that was tight, advice, and overrides for the next run."""

    finding: str
    steps: tuple[str, ...] = ()
    overrides: str | None = None


@dataclass(frozen=True)
class Story:
    """The story of a job. Attempts, launches, spans and marks are oldest first."""

    name: str
    folder: str
    files: tuple[str, ...]
    # a sentence for each thing that was missing or damaged
    gaps: tuple[str, ...]
    # what was run: `trainer`, `model`, `dataset`, `overrides`, `command`, and with what:
    # `git commit`, `torch`, `cuda`, `driver`, `gpu` …
    about: Mapping[str, str]
    # The status in `summary.json`. `unfinished` if no end is recorded, because the job still runs
    # or its process died. `empty` if nothing is recorded.
    status: str
    result: Any
    # how long it took until its end, or its last record
    took: float
    # The seconds of each use, by name. `wall` is their sum without `stopped`.
    seconds: dict[str, float]
    # the same time, divided further: see `goodput_of`
    parts: dict[str, float]
    attempts: tuple[TimedAttempt, ...]
    launches: tuple[Launch, ...]
    spans: tuple[Span, ...]
    memory: tuple[DeviceMemory, ...]
    curves: tuple[Curve, ...]
    marks: tuple[Mark, ...]
    # how memory developed in the last attempt, in a sentence; None if unknown
    stability: str | None
    sentence: str = ""
    # what to do next time, most promising first; empty if nothing was tight
    advice: tuple[Advice, ...] = ()

    @property
    def goodput(self) -> float | None:
        """Useful time ÷ wall time, None if no time passed."""
        return share_of(self.parts)

    @property
    def peak_memory_bytes(self) -> int | None:
        """Of all attempts on the device that was used last, or None if not known."""
        on_last_device = (a for a in self.attempts if a.device == self.attempts[-1].device)
        return max((a.peak_memory_bytes or 0 for a in on_last_device), default=0) or None

    def as_json(self) -> Any:
        """Return the story with JSON's types, schema first."""
        return strict_json({"schema": SCHEMA, **fields_as_json(self)})


# --- time -----------------------------------------------------------------------------------------


def spans_of(
    launches: Sequence[Launch], attempts: Sequence[TimedAttempt], kept: Mapping[int, float]
) -> tuple[Span, ...]:
    """Cut all of a job's time into its uses, without gaps or overlaps, oldest first. ``kept`` comes
    from `kept_steps`."""
    starts = [launch.start for launch in launches]
    spans: list[Span] = []
    now = starts[0] if starts else 0.0
    for number, launch in enumerate(launches, start=1):
        attempts_of_launch = [a for a in attempts if bisect_right(starts, a.started) == number]
        away = Span("stopped", now, launch.start)
        for span in (away, *_of_launch(launch, attempts_of_launch, kept)):
            # In a damaged journal, two attempts may overlap.
            if span.end > max(span.start, now):
                spans.append(replace(span, start=max(span.start, now)))
                now = span.end
    return tuple(spans)


def seconds_of(spans: Iterable[Span], use: Use, attempt: int | None = None) -> float:
    """Return the length of all spans of a use, or of those of an attempt."""
    return math.fsum(
        span.seconds for span in spans if use == span.use and attempt in (None, span.attempt)
    )


def totals(spans: Sequence[Span]) -> dict[str, float]:
    """Return the seconds of each use by its name, and their sum without stops as ``wall``."""
    seconds: dict[str, float] = {use: seconds_of(spans, use) for use in USES}
    wall = math.fsum(span.seconds for span in spans if span.use != "stopped")
    return {**seconds, "wall": wall}


def goodput_of(spans: Sequence[Span], attempts: Sequence[TimedAttempt]) -> dict[str, float]:
    """Return the parts of the wall time, in seconds, that add up to it. ``docs/report.md`` has the
    definitions."""
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
        a_step = speed[0].seconds_per_step if speed else 0.0
        updates = attempt.noted("skipped_updates", 0)
        skipped = min(updates * a_step, useful - saving)
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
    """Return the useful share, which is called goodput, or None if no time passed."""
    wall = sum(parts.values())
    return parts["useful"] / wall if wall > 0 else None


def kept_steps(status: str, attempts: Sequence[TimedAttempt]) -> dict[int, float]:
    """Return the last step of each attempt, by its number, that no later attempt repeated. If the
    job did not complete, steps after its last checkpoint are not kept either."""
    kept: dict[int, float] = {}
    bound = math.inf
    if status != "completed":
        saved = (step for attempt in attempts for step, _ in attempt.checkpoints)
        bound = max(saved, default=0)
    for attempt in reversed(attempts):
        kept[attempt.number] = math.inf if attempt.outcome == "completed" else bound
        bound = min(bound, attempt.start_step)
    return kept


def _of_launch(
    launch: Launch, attempts: Sequence[TimedAttempt], kept: Mapping[int, float]
) -> Iterator[Span]:
    now = launch.start
    before: Use = "startup"
    if launch.device_acquired is not None:
        began = max(launch.device_acquired - launch.device_wait_seconds, now)
        yield Span("startup", now, began)
        yield Span("wait", began, launch.device_acquired)
        now = launch.device_acquired
    elif not attempts:
        before = "wait"
    for attempt in attempts:
        yield Span(before, now, attempt.started, attempt.number)
        yield from _of_attempt(attempt, kept[attempt.number])
        now = attempt.ended
        before = "wait"
    if attempts and not attempts[-1].is_retried:
        before = "startup"
    yield Span(before, now, launch.end)


def _of_attempt(attempt: TimedAttempt, kept: float) -> Iterator[Span]:
    number = attempt.number
    started = attempt.started
    ended = attempt.ended
    began = attempt.training_began
    until = _kept_until(attempt, kept)
    if attempt.outcome == "completed":
        # all the time of a trainer that never reports its start counts as training
        began = started if began is None else began
        until = ended
    if began is None or until is None:
        began = until = started
    yield Span("startup", started, began, number)
    yield Span("useful", began, until, number)
    yield Span("lost", until, ended, number)


def _kept_until(attempt: TimedAttempt, kept: float) -> float | None:
    """Return when the last kept step was done, or None if no step was kept."""
    if kept <= attempt.start_step:
        return None
    saved = [time for step, time in attempt.checkpoints if step <= kept]
    done = [time for step, time in attempt.progress if step <= kept]
    return max(saved or done, default=None)


# --- memory, scalars, marks -----------------------------------------------------------------------


def memory_of(samples: Iterable[Sample]) -> tuple[DeviceMemory, ...]:
    """Return memory over time, device by device in the order in which they were used."""
    grouped: dict[str, list[Sample]] = {}
    for sample in samples:
        grouped.setdefault(sample.device, []).append(sample)
    return tuple(
        DeviceMemory(device, tuple(samples_of_device))
        for device, samples_of_device in grouped.items()
    )


def curves_of(entries: Sequence[Entry], kept: Mapping[int, float]) -> tuple[Curve, ...]:
    """Return every metric that was reported, cut where an attempt's steps were not kept."""
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
        good = [point for point in curve if point[0] <= kept[attempt]]
        rest = curve[len(good) :]
        if good:
            curves.append(Curve(name, attempt, tuple(good)))
        if rest:
            curves.append(Curve(name, attempt, tuple(good[-1:] + rest), lost=True))
    return tuple(curves)


def marks_of(entries: Sequence[Entry], attempts: Sequence[TimedAttempt]) -> tuple[Mark, ...]:
    """Return the marks of a journal, oldest first."""
    by_number = {attempt.number: attempt for attempt in attempts}
    marks = [
        (kind, entry.time, text, by_number[entry.attempt])
        for entry in entries
        if entry.attempt in by_number
        for kind, text in _descriptions(entry.event)
    ]
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


def _descriptions(event: events.Event) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of an event's marks."""
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
