"""The attempts and launches in a journal. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from robust_train.events import (
    BatchSizeFound,
    CheckpointSaved,
    MalformedEvent,
    Progress,
    SpeedMeasured,
    TrainingStarted,
    from_json,
)
from robust_train.report.sources import Entry
from robust_train.runfolder.journal import (
    AttemptEnded,
    AttemptStarted,
    DecidedAgain,
    DeviceAcquired,
    JobEnded,
    JobStarted,
)
from robust_train.runfolder.summary import AttemptSummary
from robust_train.values import Pace, Speed

UNFINISHED = "unfinished"


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
class AttemptStory:
    """One attempt; times are seconds since the epoch."""

    number: int  # counted from 1 through all launches of the run folder
    device: str = "?"
    gpu_uuid: str | None = None  # of the first GPU, None on the CPU
    batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    ranks: int = 1
    started: float = 0.0
    ended: float = 0.0  # that of the last entry if no end is recorded
    outcome: str = UNFINISHED  # `completed`, a failure's kind, or `unfinished`
    message: str | None = None
    action: str | None = None  # action, reason: what was decided after it
    reason: str | None = None
    start_step: int = 0
    end_step: int | None = None
    peak_memory_bytes: int | None = None  # of the device, or of the process on the CPU
    training_began: float | None = None  # when the first step did, None if never
    # progress, checkpoints: (step, time) of each
    progress: tuple[tuple[int, float], ...] = field(default=(), repr=False)
    checkpoints: tuple[tuple[int, float], ...] = ()
    # about the failure, in JSON's types
    evidence: Mapping[str, object] = field(default_factory=dict)
    traceback: str | None = None
    stability: str | None = None  # how its memory developed, a sentence; None if unknown
    speed: tuple[Speed, ...] = ()  # of each rank
    faster_before: Pace | None = None  # an earlier job that was clearly faster
    num_workers: int | None = None

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.ended - self.started

    @property
    def effective_batch_size(self) -> int | None:
        """Samples per optimizer step, None if not known."""
        if self.batch_size is None or self.gradient_accumulation_steps is None:
            return None
        return self.batch_size * self.gradient_accumulation_steps * self.ranks

    @property
    def where(self) -> str:
        """Its device for people."""
        return "the CPU" if self.device == "cpu" else self.device


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
            launch = replace(launch, device_acquired=entry.time, device_wait_seconds=waited)
        launches[-1] = launch
    return tuple(launches)


def attempts_of(entries: Sequence[Entry]) -> tuple[AttemptStory, ...]:
    """Return the attempts in a journal, oldest first."""
    grouped: dict[int, list[Entry]] = {}
    last: int | None = None
    for entry in entries:
        number = entry.attempt
        if number is None and isinstance(entry.event, DecidedAgain):
            number = last  # decided anew about the attempt before
        if number is not None:
            last = number
            grouped.setdefault(number, []).append(entry)
    saved = {e.event.path: e.event.step for e in entries if isinstance(e.event, CheckpointSaved)}
    stories = (_attempt(number, own, saved) for number, own in grouped.items())
    return tuple(sorted(stories, key=lambda story: (story.started, story.number)))


def _attempt(
    number: int, entries: Sequence[Entry], saved: Mapping[str, int | None]
) -> AttemptStory:
    story = AttemptStory(number, started=entries[0].time, ended=entries[-1].time)
    progress: list[tuple[int, float]] = []
    checkpoints: list[tuple[int, float]] = []
    speeds: dict[int, Speed] = {}
    for entry in entries:
        time = entry.time
        match entry.event:
            case Progress(step=step):
                progress.append((step, time))
            case SpeedMeasured(speed=speed, rank=rank):
                speeds[rank] = speed
            case CheckpointSaved(step=int(step)):
                checkpoints.append((step, time))
            case AttemptStarted() as event:
                story = replace(
                    story,
                    device=event.device,
                    gpu_uuid=event.gpu_uuids[0] if event.gpu_uuids else None,
                    batch_size=event.batch_size,
                    gradient_accumulation_steps=event.gradient_accumulation_steps,
                    ranks=event.ranks,
                    num_workers=event.num_workers,
                    started=time,
                    start_step=saved.get(event.resume_checkpoint or "") or 0,
                )
            case TrainingStarted(step=step):
                story = replace(story, start_step=step, training_began=time)
            case BatchSizeFound(batch_size=int(size), gradient_accumulation_steps=accumulation):
                story = replace(story, batch_size=size, gradient_accumulation_steps=accumulation)
            case AttemptEnded() as event:
                story = _ended(story, event, time)
            case DecidedAgain(action=action, reason=reason):
                story = replace(story, action=action, reason=reason)
    if not story.speed:
        speeds = speeds if story.batch_size else {k: s.without_samples() for k, s in speeds.items()}
        story = replace(story, speed=tuple(speeds[rank] for rank in sorted(speeds)))
    return replace(
        story,
        training_began=story.training_began or (progress[0][1] if progress else None),
        end_step=progress[-1][0] if story.end_step is None and progress else story.end_step,
        progress=tuple(progress),
        checkpoints=tuple(checkpoints),
    )


def _ended(story: AttemptStory, event: AttemptEnded, time: float) -> AttemptStory:
    try:
        record = from_json(AttemptSummary, event.record)
    except MalformedEvent:
        return replace(story, ended=time)
    names = "device gpu_uuid ranks outcome message action reason end_step peak_memory_bytes speed "
    names += "faster_before"
    evidence = dict(event.evidence)
    traceback = evidence.pop("traceback", None)
    stability = record.memory_stability
    accumulation = record.gradient_accumulation_steps or story.gradient_accumulation_steps
    return replace(
        story,
        **{name: getattr(record, name) for name in names.split()},
        batch_size=record.batch_size or story.batch_size,
        gradient_accumulation_steps=accumulation,
        ended=time,
        evidence=evidence,
        traceback=traceback if isinstance(traceback, str) else None,
        stability=None if stability is None else stability.sentence,
    )
