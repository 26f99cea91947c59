"""A sweep's ``report.html``: all of its jobs on one page, with links to the report of each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from robust_train.files import strict_json
from robust_train.folder.lock import is_held
from robust_train.model.json import as_json
from robust_train.readable import duration
from robust_train.report.charts import loss_of_jobs
from robust_train.report.facts import Advice, Story, Use
from robust_train.report.html import FILE_NAME, render, shares, try_to_save
from robust_train.report.sources import read_sources
from robust_train.report.story import story_of
from robust_train.sweep.record import (
    ENDED,
    SWEEP_FILE,
    SweepRow,
    SweepTable,
    best_first,
    differing_overrides,
    job_folders,
    read_record,
    read_row,
    read_table,
    tally,
)

SCHEMA = 1


@dataclass(frozen=True)
class JobStory:
    """One job of a sweep: its row, and its story if it left a journal."""

    row: SweepRow
    story: Story | None = field(default=None, repr=False)

    @property
    def label(self) -> str:
        """Its number for people."""
        return "?" if self.row.job is None else str(self.row.job)

    @property
    def wall_seconds(self) -> float | None:
        """How long it took; None if unknown."""
        if self.row.wall_seconds is not None or self.story is None:
            return self.row.wall_seconds
        return self.story.seconds.get("wall")


@dataclass(frozen=True)
class SweepStory:
    """What happened in a sweep."""

    name: str  # of the sweep folder
    folder: str  # its path
    is_over: bool  # its end is recorded
    sentence: str  # what happened
    seconds: Mapping[str, float]  # of each use of time, added up over the jobs
    jobs: tuple[JobStory, ...]  # the best first

    def as_json(self) -> Any:
        """Return the story in JSON's types, schema first."""
        content = {"schema": SCHEMA, **vars(self)}
        jobs = [{"row": vars(job.row), "story": job.story} for job in self.jobs]
        return strict_json(as_json(content | {"jobs": jobs}))


def is_sweep(folder: Path) -> bool:
    """Return whether a folder is that of a sweep."""
    if os.path.exists(folder / "journal.jsonl"):
        return False
    return os.path.exists(folder / SWEEP_FILE) or any(
        os.path.exists(job / "journal.jsonl") for job in job_folders(folder)
    )


def write_sweep_report(folder: Path) -> None:
    """Write ``report.html`` into a sweep folder. A failure costs a warning."""
    try_to_save(folder / FILE_NAME, lambda: sweep_page(sweep_story_of(folder)))


def sweep_story_of(folder: Path) -> SweepStory:
    """Return the story of the sweep in a folder, as far as it can be read."""
    table = read_table(folder)
    is_over = table is not None and table.status == ENDED
    jobs = sorted(_jobs(folder, table), key=lambda job: job.row.sort_key)
    if table is not None:
        shown = replace(table, jobs=tuple(job.row for job in jobs))
        best = [row for point in best_first(shown) for row in point.rows]
        jobs.sort(key=lambda job: best.index(job.row) if job.row in best else len(best))
    stories = [job.story for job in jobs if job.story is not None]
    uses = (*(use.value for use in Use), "wall")
    wall = None if table is None else table.wall_seconds
    sentence = tally([job.row for job in jobs])
    sentence += "." if wall is None else f" in {duration(wall)}."
    if not is_over and is_held(folder):
        sentence += " It is still running."
    elif not is_over:
        sentence += " The end of the sweep is not recorded: its process was killed."
    return SweepStory(
        name=folder.resolve().name,
        folder=str(folder),
        is_over=is_over,
        sentence=sentence,
        seconds={use: sum(s.seconds.get(use, 0.0) for s in stories) for use in uses},
        jobs=tuple(jobs),
    )


def _jobs(folder: Path, table: SweepTable | None) -> list[JobStory]:
    """Return the jobs of this launch in the folder, and those that were never started."""
    jobs, seen = [], set()
    for job_dir in job_folders(folder):
        record = read_record(job_dir)
        if record is not None and table is not None and record.sweep != table.sweep:
            continue
        row = read_row(job_dir)
        has_story = (job_dir / "journal.jsonl").exists()
        jobs.append(
            JobStory(row, story_of(read_sources(job_dir)) if has_story else None)
        )
        seen.add(row.job)
    rows = () if table is None else table.jobs
    return jobs + [JobStory(row) for row in rows if row.job not in seen]


def sweep_page(sweep: SweepStory) -> str:
    """Return the page of a sweep."""
    overrides = differing_overrides([job.row for job in sweep.jobs])
    named = [(job.label, job.story) for job in sweep.jobs if job.story is not None]
    return render(
        "sweep.html.j2",
        title=sweep.name,
        sweep=sweep,
        shares=shares(sweep.seconds),
        rows=[
            (job, own, _href(sweep, job))
            for job, own in zip(sweep.jobs, overrides, strict=True)
        ],
        loss=loss_of_jobs(named),
        advice=_advice(sweep.jobs),
    )


def _href(sweep: SweepStory, job: JobStory) -> str | None:
    """Return the job's own page, relative to the sweep's: both can be moved together."""
    if job.story is None:
        return None
    return os.path.join(os.path.relpath(job.story.folder, sweep.folder), FILE_NAME)


def _advice(jobs: Sequence[JobStory]) -> list[tuple[str, Advice]]:
    """Return (jobs, advice); advice that several jobs share occurs once."""
    whose: dict[tuple[str, ...], tuple[Advice, dict[str, None]]] = {}
    for job in jobs:
        for advice in () if job.story is None else job.story.advice:
            _, labels = whose.setdefault(advice.steps, (advice, {}))
            labels[job.label] = None
    return [
        (f"{'jobs' if len(labels) > 1 else 'job'} {', '.join(labels)}", advice)
        for advice, labels in whose.values()
    ]
