"""The attempts and launches in a journal. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from robust_train.files import Json
from robust_train.folder.journal import (
    AttemptEnded,
    AttemptStarted,
    DecidedAgain,
    DeviceAcquired,
    JobEnded,
    JobStarted,
)
from robust_train.model.attempt import UNFINISHED as UNFINISHED
from robust_train.model.attempt import Attempt
from robust_train.model.events import CheckpointSaved, Event, Progress, TrainingStarted
from robust_train.report.sources import Entry


@dataclass(frozen=True)
class Launch:
    """One launch of the job; times are seconds since the epoch."""

    start: float
    end: float  # that of the last entry if the launcher died or still runs; `status` is None then
    status: str | None = None
    reason: str | None = None
    device_acquired: float | None = None  # when it had a device, None if never
    device_wait_seconds: float = 0.0  # of the time before, waiting for one


@dataclass(frozen=True)
class TimedAttempt(Attempt):
    """An attempt with the times of what it reported, in seconds since the epoch."""

    ended: float = 0.0  # time of the last entry if no end is recorded
    training_began: float | None = None  # when the first step did, None if never
    # (step, time) of each
    progress: tuple[tuple[int, float], ...] = field(default=(), repr=False)
    checkpoints: tuple[tuple[int, float], ...] = ()

    @property
    def device(self) -> str:
        """Its device."""
        return self.spec.device

    @property
    def where(self) -> str:
        """Its device for people."""
        return "the CPU" if not self.spec.gpus else self.spec.device

    @property
    def batch_size(self) -> int | None:
        """Its micro-batch size, None for a script that is given none."""
        return self.spec.batch_size if self.spec.has_batch else None

    @property
    def message(self) -> str | None:
        """Why it failed, in a line."""
        return None if self.failure is None else self.failure.message

    @property
    def stability(self) -> str | None:
        """How its memory developed, in a sentence."""
        return (
            None
            if self.memory_stability is None
            else self.memory_stability.get("sentence")
        )

    def as_json(self) -> dict[str, Json]:
        """Return the record with the times."""
        return {
            **super().as_json(),
            "seconds": round(self.ended - self.started, 3),
            "ended": self.ended,
            "training_began": self.training_began,
            "progress": [list(one) for one in self.progress],
            "checkpoints": [list(one) for one in self.checkpoints],
        }


def launches_of(entries: Sequence[Entry]) -> tuple[Launch, ...]:
    """Return the launches in a journal, oldest first."""
    launches: list[Launch] = []
    for entry in entries:
        event = entry.event
        if isinstance(event, JobStarted) or not launches:
            launches.append(Launch(entry.time, entry.time))
        launch = replace(launches[-1], end=entry.time)
        if isinstance(event, JobEnded):
            launch = replace(launch, status=event.status, reason=event.reason)
        elif isinstance(event, DeviceAcquired):
            waited = max(event.wait_seconds, 0.0)
            launch = replace(
                launch, device_acquired=entry.time, device_wait_seconds=waited
            )
        launches[-1] = launch
    return tuple(launches)


def attempts_of(entries: Sequence[Entry]) -> tuple[TimedAttempt, ...]:
    """Return the attempts in a journal whose start or end is recorded, oldest first."""
    own: dict[int, list[Entry]] = {}
    for entry in entries:
        if entry.attempt is not None:
            own.setdefault(entry.attempt, []).append(entry)
    saved = {
        e.event.path: e.event.step
        for e in entries
        if isinstance(e.event, CheckpointSaved)
    }
    found = [_attempt(number, group, saved) for number, group in own.items()]
    known = [attempt for attempt in found if attempt is not None]
    return tuple(sorted(known, key=lambda attempt: (attempt.started, attempt.number)))


def _attempt(
    number: int, entries: Sequence[Entry], saved: dict[str, int | None]
) -> TimedAttempt | None:
    attempt: TimedAttempt | None = None
    progress: list[tuple[int, float]] = []
    checkpoints: list[tuple[int, float]] = []
    began, ended = None, entries[-1].time
    for entry in entries:
        match entry.event:
            case AttemptStarted(spec=spec, resume_checkpoint=resumed_from):
                start_step = saved.get(resumed_from or "") or 0
                attempt = TimedAttempt(number, spec, entry.time, resumed_from)
                attempt = replace(attempt, start_step=start_step)
            case AttemptEnded(record=record):
                attempt, ended = (
                    TimedAttempt(**{**_fields(record), "number": number}),
                    entry.time,
                )
            case Progress(step=step):
                progress.append((step, entry.time))
            case CheckpointSaved(step=int(step)):
                checkpoints.append((step, entry.time))
            case TrainingStarted():
                began = entry.time
        attempt = _after(attempt, entry.event)
    if attempt is None:
        return None
    began = progress[0][1] if began is None and progress else began
    return replace(
        attempt,
        ended=ended,
        training_began=began,
        progress=tuple(progress),
        checkpoints=tuple(checkpoints),
    )


def _after(attempt: TimedAttempt | None, event: Event) -> TimedAttempt | None:
    """Return the attempt after an event; its end is the last word on all but the decision."""
    if attempt is None:
        return None
    if isinstance(event, DecidedAgain):
        return replace(attempt, action=event.action, reason=event.reason)
    if attempt.seconds is not None:
        return attempt
    after = attempt.after(event)
    assert isinstance(after, TimedAttempt)
    return after


def _fields(attempt: Attempt) -> dict[str, Any]:
    return {name: getattr(attempt, name) for name in Attempt.__dataclass_fields__}
