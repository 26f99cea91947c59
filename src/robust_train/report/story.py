"""The story of a job, from the content of its run folder. Pure, but for :func:`goodput_in`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from robust_train.folder.memory_samples import Sample, stability
from robust_train.folder.provenance import in_words
from robust_train.folder.state import objective_of
from robust_train.model.attempt import UNFINISHED
from robust_train.model.events import JobStarted
from robust_train.report import wording
from robust_train.report.facts import (
    Story,
    curves_of,
    goodput_of,
    kept_steps,
    marks_of,
    memory_of,
    share_of,
    spans_of,
    totals,
)
from robust_train.report.sources import (
    Sources,
    TimedAttempt,
    attempts_of,
    launches_of,
    read_sources,
)


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
        return replace(
            story,
            status=summary.status,
            sentence=sentence,
        )
    story = _with_times(story, sources)
    has_result = story.status == "completed" and summary is not None
    result = summary.result if has_result and summary is not None else None
    story = replace(
        story,
        about=about,
        result=result,
        objective=objective_of(result),
        memory=memory_of(sources, story.attempts),
        curves=curves_of(entries, kept_steps(story)),
        marks=marks_of(entries, story.attempts),
        stability=_stability(samples, story.attempts),
    )
    sentence, advice = wording.sentence_of(story), wording.advice_of(story)
    return replace(
        story,
        sentence=sentence,
        advice=advice,
    )


def _with_times(story: Story, sources: Sources) -> Story:
    """Return the story with launches and attempts, and what their time went into."""
    samples = sources.samples
    attempts = tuple(
        _with_samples(one, samples) for one in attempts_of(sources.entries)
    )
    *earlier, last = launches_of(sources.entries)
    last = replace(last, end=max([last.end, *(attempt.ended for attempt in attempts)]))
    story = replace(
        story,
        status=last.status or UNFINISHED,
        reason=last.reason,
        launches=(*earlier, last),
        attempts=attempts,
        ended=last.end,
    )
    spans = spans_of(story, kept_steps(story))
    return replace(
        story,
        started=story.launches[0].start,
        spans=spans,
        seconds=totals(spans),
        parts=goodput_of(spans, attempts),
    )


def goodput_in(run_dir: Path) -> dict[str, float] | None:
    """Return the parts of a job's time, in seconds, and ``share``, the useful one's; None without
    a record of it."""
    sources = read_sources(run_dir)
    if not sources.entries:
        return None
    parts = _with_times(Story(name="", folder=""), sources).parts
    figures = {**parts, "share": share_of(parts) or 0.0}
    return {name: round(figure, 3) for name, figure in figures.items()}


def _with_samples(attempt: TimedAttempt, samples: Sequence[Sample]) -> TimedAttempt:
    """Raise an attempt's peak to its samples'; if it has no end, let it last to the last one."""
    own = [sample for sample in samples if sample.attempt == attempt.number]
    figures = [s.resident if s.device == "cpu" else s.allocated for s in own]
    peaks = [peak for peak in (attempt.peak_memory_bytes, *figures) if peak is not None]
    ended = attempt.ended
    if attempt.outcome == UNFINISHED:
        ended = max([ended, *(sample.time for sample in own)])
    peak = max(peaks, default=None)
    return replace(
        attempt,
        peak_memory_bytes=peak,
        ended=ended,
    )


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
