"""What a report draws: memory over time, scalars over steps, and what happened when. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from robust_train.memory.samples import Sample
from robust_train.report.attempts import AttemptStory
from robust_train.report.sources import Event, finite
from robust_train.report.units import memory
from robust_train.values import MEMORY_FAILURES

_OOM = frozenset(kind.value for kind in MEMORY_FAILURES)
# of an event, but no measurement of it
_NOT_SCALARS = frozenset({"attempt", "step", "total_steps", "epoch"})


@dataclass(frozen=True)
class Mark:
    """Something that happened at one moment.

    Attributes:
        kind: ``oom``, ``batch``, ``device``, ``cleared``, ``checkpoint`` or ``milestone``.
        time: seconds since the epoch.
        text: what it was, for people.
        attempt: in which attempt.
        device: on which device.
    """

    kind: str
    time: float
    text: str
    attempt: int
    device: str


@dataclass(frozen=True)
class DeviceMemory:
    """Memory over time on one device.

    Attributes:
        device: ``cuda:<index>`` or ``cpu``.
        samples: oldest first.
        marks: what happened on it.
        sampled: False where there are only the figures that the trainer reported now and then.
    """

    device: str
    samples: tuple[Sample, ...] = field(repr=False)
    marks: tuple[Mark, ...] = field(default=(), repr=False)
    sampled: bool = True

    @property
    def total_bytes(self) -> int | None:
        """What the GPU has."""
        return self.most("gpu_total")

    def most(self, name: str) -> int | None:
        """The highest value of one figure, None where there is none."""
        return max(
            (value for sample in self.samples if (value := getattr(sample, name)) is not None),
            default=None,
        )


@dataclass(frozen=True)
class Curve:
    """A scalar over steps, as one attempt reported it.

    Attributes:
        name: ``loss``, ``val_accuracy`` …
        attempt: number of the attempt.
        points: (step, value).
        lost: these steps were done again by a later attempt, or are saved nowhere.
    """

    name: str
    attempt: int
    points: tuple[tuple[int, float], ...] = field(repr=False)
    lost: bool = False


def memory_of(
    samples: Sequence[Sample],
    events: Sequence[Event],
    attempts: Sequence[AttemptStory],
    marks: Sequence[Mark],
) -> tuple[DeviceMemory, ...]:
    """Memory over time, device by device in the order in which they were used."""
    sampled = {sample.attempt for sample in samples}
    devices = {attempt.number: attempt.device for attempt in attempts}
    reported = [
        sample
        for event in events
        if (sample := _as_sample(event, devices)) is not None and sample.attempt not in sampled
    ]
    everything = sorted([*samples, *reported], key=lambda sample: (sample.time, sample.attempt))
    grouped: dict[str, list[Sample]] = {}
    for sample in everything:
        grouped.setdefault(sample.device, []).append(sample)
    return tuple(
        DeviceMemory(
            device,
            tuple(own),
            tuple(mark for mark in marks if mark.device == device),
            any(sample.attempt in sampled for sample in own),
        )
        for device, own in grouped.items()
    )


def curves_of(
    events: Sequence[Event], attempts: Sequence[AttemptStory], kept: dict[int, float]
) -> tuple[Curve, ...]:
    """Every scalar that was reported, cut where an attempt's steps were not kept."""
    known = {attempt.number for attempt in attempts}
    points: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for event in events:
        step, attempt = event.whole("step"), event.whole("attempt")
        if event.name not in ("progress", "epoch") or step is None or attempt not in known:
            continue
        for name, value in _scalars(event):
            points.setdefault((name, attempt), []).append((step, value))
    return tuple(
        curve
        for (name, attempt), own in points.items()
        for curve in _cut(name, attempt, own, kept[attempt])
    )


def marks_of(events: Sequence[Event], attempts: Sequence[AttemptStory]) -> tuple[Mark, ...]:
    """What happened, oldest first."""
    devices = {attempt.number: attempt.device for attempt in attempts}
    marks = [
        Mark(kind, event.time, text, attempt, devices[attempt])
        for event in events
        if (attempt := event.whole("attempt") or 0) in devices
        for kind, text in _told(event)
    ]
    for before, after in itertools.pairwise(attempts):
        marks += _change(before, after)
    for one in attempts:
        if one.outcome in _OOM:
            text = f"attempt {one.number}: {one.message or 'out of memory'}"
            marks.append(Mark("oom", one.ended, text, one.number, one.device))
    return tuple(sorted(marks, key=lambda mark: mark.time))


def _as_sample(event: Event, devices: dict[int, str]) -> Sample | None:
    attempt = event.whole("attempt")
    # of several processes the first one's memory is drawn
    if event.name != "memory" or attempt not in devices or event.whole("rank"):
        return None
    names = ("allocated", "reserved", "resident")
    figures: dict[str, int | None] = {name: event.whole(name) for name in names}
    if all(value is None for value in figures.values()):
        return None
    return Sample(event.time, attempt, devices[attempt], **figures)


def _scalars(event: Event) -> Iterator[tuple[str, float]]:
    for name, value in event.fields.items():
        number = finite(value)
        if number is not None and name not in _NOT_SCALARS:
            yield name, number


def _cut(name: str, attempt: int, points: list[tuple[int, float]], kept: float) -> Iterator[Curve]:
    good = [point for point in points if point[0] <= kept]
    rest = points[len(good) :]
    if good:
        yield Curve(name, attempt, tuple(good))
    if rest:
        yield Curve(name, attempt, tuple(good[-1:] + rest), lost=True)


def _told(event: Event) -> Iterator[tuple[str, str]]:
    step = event.whole("step")
    at = "" if step is None else f" at step {step}"
    if event.name == "micro_batch_changed":
        before, after = event.whole("before"), event.whole("after")
        change = f"micro-batch {before} → {after}{at}"
        if event.text("kind") in _OOM:
            yield "oom", f"inside a step{at}: {event.text('reason') or 'out of memory'}"
        yield "batch", change
    elif event.name == "micro_batch_exhausted":
        yield "oom", f"inside a step{at}: {event.text('reason') or 'out of memory'}"
    elif event.name == "batch_size_found":
        yield (
            "batch",
            f"micro-batch {event.whole('batch_size') or 'that fits: none'} found by probes",
        )
    elif event.name == "checkpoint":
        yield "checkpoint", f"checkpoint{at}"
    elif event.name == "memory" and not event.whole("rank"):
        yield "milestone", event.text("milestone") or "memory reported"
    elif event.name == "memory_cleared":
        yield "cleared", _cleared(event)


def _cleared(event: Event) -> str:
    freed = event.number("returned_bytes")
    told = f"memory cleared ({event.text('reason') or 'asked for'})"
    return told if freed is None else f"{told}: {memory(freed)} returned"


def _change(before: AttemptStory, after: AttemptStory) -> Iterator[Mark]:
    def mark(kind: str, text: str) -> Mark:
        return Mark(kind, after.started, text, after.number, after.device)

    if before.device != after.device or before.gpu_uuid != after.gpu_uuid:
        yield mark("device", f"{before.device} → {after.device}")
    if before.batch_size != after.batch_size:
        yield mark("batch", f"micro-batch {before.batch_size} → {after.batch_size}")
