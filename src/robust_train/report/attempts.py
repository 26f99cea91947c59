"""Attempts and launches as the journal tells of them. All of it is pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from robust_train.report.sources import Event

UNFINISHED = "unfinished"


@dataclass(frozen=True)
class Launch:
    """One launch of the job: the launcher's start to its end, or to its last sign of life.

    Attributes:
        start: seconds since the epoch.
        end: likewise.
        status: as ``summary.json`` has it, None where the launcher died or still runs.
        reason: one sentence for any status but ``completed``.
        device_acquired: when it had a device, None if never.
        device_wait_seconds: of the time before, waiting for one.
    """

    start: float
    end: float
    status: str | None = None
    reason: str | None = None
    device_acquired: float | None = None
    device_wait_seconds: float = 0.0


@dataclass(frozen=True)
class AttemptStory:
    """One attempt.

    Attributes:
        number: counted from 1 through all launches of the run folder.
        device: ``cuda:<index>`` or ``cpu``.
        gpu_uuid: of the GPU, None on the CPU.
        batch_size, gradient_accumulation_steps, ranks: what it was to use.
        started, ended: seconds since the epoch; the end is the last sign of life where it died.
        outcome: ``completed``, a failure's kind, or ``unfinished``.
        message: of the failure.
        action, reason: what was decided after it.
        start_step: the step it went on from.
        end_step: the last one it reported.
        peak_memory_bytes: of the device, or of the process on the CPU.
        training_began: when the first step did, None if never.
        progress: (step, time) of each report.
        checkpoints: (step, time) of each checkpoint.
        evidence: about the failure, in JSON's types.
        traceback: of the failure.
        stability: how its memory developed, a sentence; None where nobody said.
    """

    number: int
    device: str = "?"
    gpu_uuid: str | None = None
    batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    ranks: int = 1
    started: float = 0.0
    ended: float = 0.0
    outcome: str = UNFINISHED
    message: str | None = None
    action: str | None = None
    reason: str | None = None
    start_step: int = 0
    end_step: int | None = None
    peak_memory_bytes: int | None = None
    training_began: float | None = None
    progress: tuple[tuple[int, float], ...] = field(default=(), repr=False)
    checkpoints: tuple[tuple[int, float], ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    traceback: str | None = None
    stability: str | None = None

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.ended - self.started

    @property
    def effective_batch_size(self) -> int | None:
        """Samples per optimizer step, None where it is not known."""
        if self.batch_size is None or self.gradient_accumulation_steps is None:
            return None
        return self.batch_size * self.gradient_accumulation_steps * self.ranks

    @property
    def place(self) -> str:
        """Its device for people."""
        return "the CPU" if self.device == "cpu" else self.device


def launches_of(events: Sequence[Event]) -> tuple[Launch, ...]:
    """The launches that a journal tells of, oldest first."""
    launches: list[Launch] = []
    for event in events:
        if event.name == "job_started" or not launches:
            launches.append(Launch(event.time, event.time))
        launch = replace(launches[-1], end=event.time)
        if event.name == "job_ended":
            launch = replace(launch, status=event.text("status"), reason=event.text("reason"))
        elif event.name == "device_acquired":
            waited = max(event.number("wait_seconds") or 0.0, 0.0)
            launch = replace(launch, device_acquired=event.time, device_wait_seconds=waited)
        launches[-1] = launch
    return tuple(launches)


def attempts_of(events: Sequence[Event]) -> tuple[AttemptStory, ...]:
    """The attempts that a journal tells of, oldest first."""
    grouped: dict[int, list[Event]] = {}
    last: int | None = None
    for event in events:
        number = event.whole("attempt")
        if number is not None:
            last = number
        elif event.name in ("waited_in_vain", "lost_race"):
            number = last  # decided anew about the attempt before
        if number is not None:
            grouped.setdefault(number, []).append(event)
    saved = {event.text("path"): event.whole("step") for event in events if event.text("path")}
    stories = (_attempt(number, own, saved) for number, own in grouped.items())
    return tuple(sorted(stories, key=lambda story: (story.started, story.number)))


def _attempt(
    number: int, events: Sequence[Event], saved: Mapping[str | None, int | None]
) -> AttemptStory:
    story = AttemptStory(number, started=events[0].time, ended=events[-1].time)
    progress: list[tuple[int, float]] = []
    checkpoints: list[tuple[int, float]] = []
    for event in events:
        step = event.whole("step")
        if event.name == "progress" and step is not None:
            progress.append((step, event.time))
        elif event.name == "checkpoint" and step is not None:
            checkpoints.append((step, event.time))
        elif event.name == "attempt_started":
            story = _started(story, event, saved)
        elif event.name == "training_started":
            story = replace(story, start_step=step or 0, training_began=event.time)
        elif event.name == "batch_size_found":
            story = replace(story, **_what_it_used(story, event))
        elif event.name == "attempt_ended":
            story = _ended(story, event)
        elif event.name in ("waited_in_vain", "lost_race"):
            story = replace(story, action=event.text("action"), reason=event.text("reason"))
    began = story.training_began
    if began is None and progress:
        began = progress[0][1]
    end_step = story.end_step
    if end_step is None and progress:
        end_step = progress[-1][0]
    return replace(
        story,
        training_began=began,
        end_step=end_step,
        progress=tuple(progress),
        checkpoints=tuple(checkpoints),
    )


def _started(
    story: AttemptStory, event: Event, saved: Mapping[str | None, int | None]
) -> AttemptStory:
    return replace(
        story,
        **_what_it_used(story, event),
        started=event.time,
        start_step=saved.get(event.text("resume_checkpoint")) or 0,
    )


def _ended(story: AttemptStory, event: Event) -> AttemptStory:
    evidence = event.fields.get("evidence")
    evidence = dict(evidence) if isinstance(evidence, Mapping) else {}
    traceback = evidence.pop("traceback", None)
    stability = event.fields.get("memory_stability")
    told = stability.get("sentence") if isinstance(stability, Mapping) else None
    return replace(
        story,
        **_what_it_used(story, event),
        ended=event.time,
        outcome=event.text("outcome") or UNFINISHED,
        message=event.text("message"),
        action=event.text("action"),
        reason=event.text("reason"),
        end_step=event.whole("end_step"),
        peak_memory_bytes=event.whole("peak_memory_bytes"),
        evidence=evidence,
        traceback=traceback if isinstance(traceback, str) else None,
        stability=told if isinstance(told, str) else None,
    )


def _what_it_used(story: AttemptStory, event: Event) -> dict[str, Any]:
    accumulation = event.whole("gradient_accumulation_steps")
    return {
        "device": event.text("device") or story.device,
        "gpu_uuid": event.text("gpu_uuid") or story.gpu_uuid,
        "batch_size": event.whole("batch_size") or story.batch_size,
        "gradient_accumulation_steps": accumulation or story.gradient_accumulation_steps,
        "ranks": event.whole("ranks") or story.ranks,
    }
