"""Builds the story of a job, the facts and sentences of its report, from its run folder's content.

The launcher calls it at the job's end, a sweep for its own page, and ``robust-train report`` later.
It reads no files: `sources.read_sources` has read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from robust_train.folder.memory_samples import Sample
from robust_train.folder.provenance import in_words
from robust_train.model.attempt import UNFINISHED
from robust_train.model.events import JobStarted
from robust_train.model.json import Json
from robust_train.report import wording
from robust_train.report.facts import (
    Story,
    curves_of,
    goodput_of,
    kept_steps,
    marks_of,
    memory_of,
    spans_of,
    totals,
)
from robust_train.report.sources import Sources, TimedAttempt, attempts_of, launches_of


def story_of(sources: Sources) -> Story:
    """Return the story of the job whose run folder was read."""
    entries = sources.entries
    samples = sources.samples
    summary = sources.summary
    about: dict[str, str] = {}
    keys: Mapping[str, str] | None = None
    for entry in entries:  # The record of the last launch replaces earlier records.
        if isinstance(entry.event, JobStarted):
            about = {"trainer": entry.event.trainer, **entry.event.about}
            keys = entry.event.keys
    about |= in_words(sources.environment)
    attempts = tuple(_with_samples(attempt, samples) for attempt in attempts_of(entries))
    held = wording.describe_held_memory(attempts)
    if held:
        about["GPU memory held"] = held
    launches = list(launches_of(entries))
    status = "empty" if summary is None else summary.status
    if launches:
        last = launches[-1]
        end = max([last.end, *(attempt.ended for attempt in attempts)])
        launches[-1] = replace(last, end=end)
        status = last.status or UNFINISHED
    kept = kept_steps(status, attempts)
    spans = spans_of(launches, attempts, kept)
    seconds = totals(spans)
    story = Story(
        name=str(about.get("name") or sources.folder.resolve().name),
        folder=str(sources.folder),
        files=sources.files,
        gaps=sources.gaps,
        about=about,
        status=status,
        result=summary.result if summary and status == "completed" else None,
        took=seconds["wall"] if sources.took is None else sources.took,
        seconds=seconds,
        parts=goodput_of(spans, attempts),
        attempts=attempts,
        launches=tuple(launches),
        spans=spans,
        memory=memory_of(samples),
        curves=curves_of(entries, kept),
        marks=marks_of(entries, attempts),
        stability=_stability(attempts),
    )
    sentence = wording.sentence_of(story)
    advice = tuple(wording.advice_of(story, keys))
    return replace(story, sentence=sentence, advice=advice)


def goodput_from(sources: Sources) -> dict[str, float] | None:
    """Return the parts of a job's time, in seconds, and its useful ``share``.

    Returns None if no launch is recorded.
    """
    story = story_of(sources)
    if not story.launches:
        return None
    figures = {**story.parts, "share": story.goodput or 0.0}
    return {name: round(figure, 3) for name, figure in figures.items()}


def _with_samples(attempt: TimedAttempt, samples: Sequence[Sample]) -> TimedAttempt:
    """Return an attempt with the facts that memory samples add.

    Its peak is at least the samples' peak. An attempt without a recorded end lasts until its last
    sample.
    """
    samples_of_attempt = [sample for sample in samples if sample.attempt == attempt.number]
    figures = [s.resident if s.device == "cpu" else s.allocated for s in samples_of_attempt]
    peak = max([attempt.peak_memory_bytes or 0, *(figure or 0 for figure in figures)])
    ended = attempt.ended
    if attempt.outcome == UNFINISHED:
        ended = max([ended, *(sample.time for sample in samples_of_attempt)])
    return replace(attempt, peak_memory_bytes=peak or None, ended=ended)


def _stability(attempts: Sequence[TimedAttempt]) -> str | None:
    """Return how memory developed in the last attempt that trained, None if unknown."""
    trained = [attempt for attempt in attempts if attempt.training_began is not None]
    noted: Mapping[str, Json] | None = None
    if trained:
        noted = trained[-1].noted("memory_stability", None)
    sentence = str((noted or {}).get("sentence") or "unknown")
    return None if sentence.startswith("unknown") else sentence
