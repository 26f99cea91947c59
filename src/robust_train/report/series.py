"""The data of a report's charts: memory over time, scalars over steps, and events. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from robust_train.files import finite
from robust_train.memory.samples import Sample
from robust_train.model import events
from robust_train.model.failure import MEMORY_FAILURES
from robust_train.readable import memory
from robust_train.report.attempts import TimedAttempt
from robust_train.report.sources import Entry

OOM = frozenset(kind.value for kind in MEMORY_FAILURES)
_LONGEST_FIELDS = 120


@dataclass(frozen=True)
class Mark:
    """Something that happened at one moment (``time``: seconds since the epoch). ``kind`` is
    ``oom``, ``batch``, ``device``, ``cleared``, ``checkpoint`` or ``milestone``."""

    kind: str
    time: float
    text: str
    attempt: int
    device: str

    @property
    def is_inside_a_step(self) -> bool:
        """Memory ran out inside a step, and the attempt went on."""
        return self.kind == "oom" and self.text.startswith("inside")


@dataclass(frozen=True)
class DeviceMemory:
    """Samples of memory and marks on one device, oldest first. ``sampled`` is False if there are
    only the figures that the trainer reported now and then."""

    device: str
    samples: tuple[Sample, ...] = field(repr=False)
    marks: tuple[Mark, ...] = field(default=(), repr=False)
    sampled: bool = True

    def most(self, name: str) -> int | None:
        """Return the highest value of one figure, None if there is none."""
        values = (getattr(sample, name) for sample in self.samples)
        return max((value for value in values if value is not None), default=None)


@dataclass(frozen=True)
class Curve:
    """A scalar over steps, as (step, value) that one attempt reported. ``lost``: a later attempt
    repeated these steps, or no checkpoint holds them."""

    name: str
    attempt: int
    points: tuple[tuple[int, float], ...] = field(repr=False)
    lost: bool = False


def memory_of(
    samples: Sequence[Sample],
    entries: Sequence[Entry],
    attempts: Sequence[TimedAttempt],
    marks: Sequence[Mark],
) -> tuple[DeviceMemory, ...]:
    """Return memory over time, device by device in the order in which they were used."""
    sampled = {sample.attempt for sample in samples}
    devices = {a.number: a.device for a in attempts if a.number not in sampled}
    everything = sorted(
        [*samples, *_reported(entries, devices)], key=lambda s: (s.time, s.attempt)
    )
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


def _reported(entries: Sequence[Entry], devices: Mapping[int, str]) -> Iterator[Sample]:
    """Yield the figures that the trainer reported in attempts without samples."""
    for entry in entries:
        event, number = entry.event, entry.attempt or 0
        # of several ranks, the first one's memory is drawn
        if (
            isinstance(event, events.MemoryReported)
            and not event.rank
            and number in devices
        ):
            figures = {
                k: getattr(event, k) for k in ("allocated", "reserved", "resident")
            }
            if event.figures:
                yield Sample(entry.time, number, devices[number], **figures)


def curves_of(
    entries: Sequence[Entry],
    attempts: Sequence[TimedAttempt],
    kept: Mapping[int, float],
) -> tuple[Curve, ...]:
    """Return every metric that was reported, cut where an attempt's steps were not kept."""
    known = {attempt.number for attempt in attempts}
    points: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for entry in entries:
        event, attempt = entry.event, entry.attempt
        if (
            not isinstance(event, (events.Progress, events.EpochEnded))
            or attempt not in known
        ):
            continue
        for name, value in event.metrics.items():
            number = finite(value)
            if number is not None and event.step is not None:
                points.setdefault((name, attempt), []).append((event.step, number))
    curves = []
    for (name, attempt), own in points.items():
        good = [point for point in own if point[0] <= kept[attempt]]
        rest = own[len(good) :]
        if good:
            curves.append(Curve(name, attempt, tuple(good)))
        if rest:
            curves.append(Curve(name, attempt, tuple(good[-1:] + rest), lost=True))
    return tuple(curves)


def marks_of(
    entries: Sequence[Entry], attempts: Sequence[TimedAttempt]
) -> tuple[Mark, ...]:
    """Return the marks of a journal, oldest first."""
    devices = {attempt.number: attempt.device for attempt in attempts}
    marks = [
        Mark(kind, entry.time, text, attempt, devices[attempt])
        for entry in entries
        if (attempt := entry.attempt or 0) in devices
        for kind, text in _descriptions(entry.event)
    ]
    for before, after in itertools.pairwise(attempts):
        for kind, text in _changes(before, after):
            marks.append(Mark(kind, after.started, text, after.number, after.device))
    for one in attempts:
        if one.outcome in OOM:
            text = f"attempt {one.number}: {one.message or 'out of memory'}"
            marks.append(Mark("oom", one.ended, text, one.number, one.device))
    return tuple(sorted(marks, key=lambda mark: mark.time))


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
            yield "batch", f"probes found micro-batch {size or 'that fits: none'}"
        case events.CheckpointSaved(step=step):
            yield (
                "checkpoint",
                "checkpoint" + ("" if step is None else f" at step {step}"),
            )
        case events.MemoryReported(milestone=milestone) if not event.rank:
            yield "milestone", milestone
        case events.MemoryCleared(reason=reason, returned_bytes=returned):
            yield "cleared", f"memory cleared ({reason}): {memory(returned)} returned"
        case events.UserEvent(event_name=name, fields=fields):
            values = ", ".join(f"{key}={value}" for key, value in fields.items())
            yield (
                "milestone",
                name + (f": {values[:_LONGEST_FIELDS]}" if values else ""),
            )


def _changes(before: TimedAttempt, after: TimedAttempt) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of what the later attempt changes."""
    if before.device != after.device or before.spec.device_key != after.spec.device_key:
        yield "device", f"{before.device} → {after.device}"
    if before.batch_size != after.batch_size:
        yield "batch", f"micro-batch {before.batch_size} → {after.batch_size}"
