"""The story of a job, from the content of its run folder. Pure: sources in, frozen values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from robust_train.files import fields_as_json, strict_json
from robust_train.folder.journal import JobStarted
from robust_train.folder.provenance import in_words
from robust_train.folder.summary import objective_of
from robust_train.memory.samples import Sample
from robust_train.memory.stability import stability
from robust_train.report import guidance, wording
from robust_train.report.attempts import (
    UNFINISHED,
    Launch,
    TimedAttempt,
    attempts_of,
    launches_of,
)
from robust_train.report.series import (
    Curve,
    DeviceMemory,
    Mark,
    curves_of,
    marks_of,
    memory_of,
)
from robust_train.report.sources import Sources
from robust_train.report.times import Span, kept_steps, spans_of, totals

SCHEMA = 1


@dataclass(frozen=True)
class Story:
    """What happened in a job. Attempts, launches, spans and marks are oldest first."""

    name: str
    folder: str
    # what was run: `trainer`, `model`, `dataset`, `overrides`, `command`, and with what:
    # `git commit`, `torch`, `cuda`, `driver`, `gpu` …
    about: Mapping[str, str] = field(default_factory=dict)
    # as in `summary.json`; `unfinished` if no end is recorded, because the job still runs or its
    # process died; `empty` if nothing at all is
    status: str = "empty"
    sentence: str = "The folder holds no record of a job."
    result: Any = None
    objective: Any = None
    started: float | None = (
        None  # started, ended: seconds since the epoch, None in an empty folder
    )
    ended: float | None = None
    # of each use, by its name; `wall` is their sum without `stopped`
    seconds: dict[str, float] = field(default_factory=dict)
    attempts: tuple[TimedAttempt, ...] = ()
    launches: tuple[Launch, ...] = ()
    spans: tuple[Span, ...] = ()
    memory: tuple[DeviceMemory, ...] = field(default=(), repr=False)
    curves: tuple[Curve, ...] = field(default=(), repr=False)
    marks: tuple[Mark, ...] = field(default=(), repr=False)
    # how memory developed in the last attempt, in a sentence; None if unknown
    stability: str | None = None
    # what to do next time, most promising first; empty if nothing was tight
    advice: tuple[guidance.Advice, ...] = ()
    reason: str | None = None
    files: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()  # a sentence for each thing that was missing or damaged

    @property
    def useful_share(self) -> float | None:
        """Useful time ÷ wall time (goodput), None if no time passed."""
        wall = self.seconds.get("wall", 0.0)
        return self.seconds["useful"] / wall if wall > 0 else None

    @property
    def peak_memory_bytes(self) -> int | None:
        """Of all attempts on the device that was used last; None if not known."""
        device = self.attempts[-1].device if self.attempts else None
        peaks = (a.peak_memory_bytes for a in self.attempts if a.device == device)
        return max((peak for peak in peaks if peak is not None), default=None)

    def as_json(self) -> Any:
        """Return the story with JSON's types, schema first."""
        return strict_json({"schema": SCHEMA, **fields_as_json(self)})


def story_of(sources: Sources) -> Story:
    """Return what happened in the job whose run folder was read."""
    job, folder_name = _job_of(sources), sources.folder.resolve().name
    story = Story(
        name=str(job.about.get("name") or folder_name) if job else folder_name,
        folder=str(sources.folder),
        files=sources.files,
        gaps=sources.gaps,
    )
    if not sources.entries:
        if sources.summary is None:
            return story
        sentence = "The journal is missing; of the job only summary.json is left."
        return replace(story, status=sources.summary.status, sentence=sentence)
    attempts = tuple(
        _with_samples(
            attempt, [s for s in sources.samples if s.attempt == attempt.number]
        )
        for attempt in attempts_of(sources.entries)
    )
    *earlier, last = launches_of(sources.entries)
    last = replace(last, end=max([last.end, *(attempt.ended for attempt in attempts)]))
    launches = (*earlier, last)
    status = last.status or UNFINISHED
    completed = status == "completed"
    kept = kept_steps(attempts, completed=completed)
    spans = spans_of(launches, attempts, kept)
    seconds = totals(spans)
    marks = marks_of(sources.entries, attempts)
    memory = memory_of(sources.samples, sources.entries, attempts, marks)
    stable = _stability(sources.samples, attempts)
    result = (
        sources.summary.result if completed and sources.summary is not None else None
    )
    return replace(
        story,
        about={
            **({} if job is None else {"trainer": job.trainer, **job.about}),
            **in_words(sources.environment),
        },
        status=status,
        sentence=wording.sentence_of(status, last.reason, attempts, seconds, marks),
        result=result,
        objective=objective_of(result),
        started=launches[0].start,
        ended=last.end,
        seconds=seconds,
        attempts=attempts,
        launches=launches,
        spans=spans,
        memory=memory,
        curves=curves_of(sources.entries, attempts, kept),
        marks=marks,
        stability=stable,
        advice=guidance.advice_of(attempts, memory, marks, spans, seconds, stable),
        reason=last.reason,
    )


def _job_of(sources: Sources) -> JobStarted | None:
    """Return the start that the last launch recorded."""
    started = [
        one.event for one in sources.entries if isinstance(one.event, JobStarted)
    ]
    return started[-1] if started else None


def _with_samples(attempt: TimedAttempt, samples: Sequence[Sample]) -> TimedAttempt:
    """Raise an attempt's peak to its samples'; if it has no end, let it last to the last one."""
    figures = (s.resident if s.device == "cpu" else s.allocated for s in samples)
    peaks = [peak for peak in (attempt.peak_memory_bytes, *figures) if peak is not None]
    attempt = replace(attempt, peak_memory_bytes=max(peaks, default=None))
    if attempt.outcome != UNFINISHED:
        return attempt
    return replace(attempt, ended=max([attempt.ended, *(s.time for s in samples)]))


def _stability(
    samples: Sequence[Sample], attempts: Sequence[TimedAttempt]
) -> str | None:
    """Return how memory developed in the last attempt that trained."""
    trained = [a for a in attempts if a.training_began is not None]
    if not trained:
        return None
    sentence = trained[-1].stability
    if sentence is None:  # its end was not recorded
        sentence = stability(
            [s for s in samples if s.attempt == trained[-1].number]
        ).sentence
    return None if sentence.startswith("unknown") else sentence
