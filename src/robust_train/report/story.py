"""The story of a job, from the content of its run folder. Pure, but for :func:`goodput_in`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from robust_train.files import strict_json
from robust_train.folder.memory_samples import Sample, stability
from robust_train.folder.provenance import in_words
from robust_train.folder.state import objective_of
from robust_train.model.attempt import UNFINISHED
from robust_train.model.events import JobStarted
from robust_train.model.json import fields_as_json
from robust_train.report import wording
from robust_train.report.facts import (
    Curve,
    DeviceMemory,
    Mark,
    Span,
    curves_of,
    goodput_of,
    kept_steps,
    marks_of,
    memory_of,
    spans_of,
    totals,
)
from robust_train.report.sources import (
    Launch,
    Sources,
    TimedAttempt,
    attempts_of,
    launches_of,
    read_sources,
)

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
    # started, ended: seconds since the epoch, None in an empty folder
    started: float | None = None
    ended: float | None = None
    # of each use, by its name; `wall` is their sum without `stopped`
    seconds: dict[str, float] = field(default_factory=dict)
    # the same time, divided further: see `GOODPUT`
    parts: dict[str, float] = field(default_factory=dict)
    attempts: tuple[TimedAttempt, ...] = ()
    launches: tuple[Launch, ...] = ()
    spans: tuple[Span, ...] = ()
    memory: tuple[DeviceMemory, ...] = field(default=(), repr=False)
    curves: tuple[Curve, ...] = field(default=(), repr=False)
    marks: tuple[Mark, ...] = field(default=(), repr=False)
    # how memory developed in the last attempt, in a sentence; None if unknown
    stability: str | None = None
    # what to do next time, most promising first; empty if nothing was tight
    advice: tuple[wording.Advice, ...] = ()
    reason: str | None = None
    files: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()  # a sentence for each thing that was missing or damaged

    @property
    def goodput(self) -> float | None:
        """Useful time ÷ wall time, None if no time passed."""
        return share_of(self.parts)

    @property
    def peak_memory_bytes(self) -> int | None:
        """Of all attempts on the device that was used last; None if not known."""
        own = (a for a in self.attempts if a.device == self.attempts[-1].device)
        return max((a.peak_memory_bytes or 0 for a in own), default=0) or None

    def as_json(self) -> Any:
        """Return the story with JSON's types, schema first."""
        return strict_json({"schema": SCHEMA, **fields_as_json(self)})


def story_of(sources: Sources) -> Story:
    """Return what happened in the job whose run folder was read."""
    entries, samples, summary = sources.entries, sources.samples, sources.summary
    about: dict[str, str] = {}
    for entry in entries:  # what the last launch recorded counts
        if isinstance(entry.event, JobStarted):
            about = {"trainer": entry.event.trainer, **entry.event.about}
    about |= in_words(sources.environment)
    story = Story(
        name=str(about.get("name") or sources.folder.resolve().name),
        folder=str(sources.folder),
        files=sources.files,
        gaps=sources.gaps,
    )
    if not entries:
        if summary is None:
            return story
        sentence = "The journal is missing; of the job only summary.json is left."
        return replace(story, status=summary.status, sentence=sentence)
    attempts, launches, kept, spans = _timeline(sources)
    last = launches[-1]
    status = last.status or UNFINISHED
    completed = status == "completed"
    seconds = totals(spans)
    marks = marks_of(entries, attempts)
    memory = memory_of(samples, entries, attempts)
    stable = _stability(samples, attempts)
    result = summary.result if completed and summary is not None else None
    return replace(
        story,
        about=about,
        status=status,
        sentence=wording.sentence_of(status, last.reason, attempts, seconds, marks),
        result=result,
        objective=objective_of(result),
        started=launches[0].start,
        ended=last.end,
        seconds=seconds,
        parts=goodput_of(spans, attempts),
        attempts=attempts,
        launches=launches,
        spans=spans,
        memory=memory,
        curves=curves_of(entries, attempts, kept),
        marks=marks,
        stability=stable,
        advice=wording.advice_of(attempts, memory, marks, spans, seconds, stable),
        reason=last.reason,
    )


def _timeline(
    sources: Sources,
) -> tuple[
    tuple[TimedAttempt, ...],
    tuple[Launch, ...],
    dict[int, float],
    tuple[Span, ...],
]:
    """Return attempts, launches, the last kept step of each attempt, and the uses of time."""
    entries, samples = sources.entries, sources.samples
    attempts = tuple(_with_samples(one, samples) for one in attempts_of(entries))
    *earlier, last = launches_of(entries)
    last = replace(last, end=max([last.end, *(attempt.ended for attempt in attempts)]))
    launches = (*earlier, last)
    kept = kept_steps(attempts, completed=last.status == "completed")
    return attempts, launches, kept, spans_of(launches, attempts, kept)


def goodput_in(run_dir: Path) -> dict[str, float] | None:
    """Return the parts of a job's time, in seconds, and ``share``, the useful one's; None without
    a record of it."""
    sources = read_sources(run_dir)
    if not sources.entries:
        return None
    attempts, *_, spans = _timeline(sources)
    parts = goodput_of(spans, attempts)
    share = share_of(parts) or 0.0
    return {
        name: round(figure, 3) for name, figure in {**parts, "share": share}.items()
    }


def share_of(parts: Mapping[str, float]) -> float | None:
    """Return the useful share, which is called goodput; None if no time passed."""
    wall = sum(parts.values())
    return parts["useful"] / wall if wall > 0 else None


def _with_samples(attempt: TimedAttempt, samples: Sequence[Sample]) -> TimedAttempt:
    """Raise an attempt's peak to its samples'; if it has no end, let it last to the last one."""
    own = [sample for sample in samples if sample.attempt == attempt.number]
    figures = [s.resident if s.device == "cpu" else s.allocated for s in own]
    peaks = [peak for peak in (attempt.peak_memory_bytes, *figures) if peak is not None]
    ended = attempt.ended
    if attempt.outcome == UNFINISHED:
        ended = max([ended, *(sample.time for sample in own)])
    peak = max(peaks, default=None)
    return replace(attempt, peak_memory_bytes=peak, ended=ended)


def _stability(
    samples: Sequence[Sample], attempts: Sequence[TimedAttempt]
) -> str | None:
    """Return how memory developed in the last attempt that trained."""
    for attempt in reversed(attempts):
        if attempt.training_began is not None:
            known = attempt.memory_stability or {}
            sentence = str(known.get("sentence") or "")
            if not sentence:  # its end was not recorded
                own = [s for s in samples if s.attempt == attempt.number]
                sentence = stability(own).sentence
            return None if sentence.startswith("unknown") else sentence
    return None
