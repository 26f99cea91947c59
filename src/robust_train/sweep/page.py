"""A sweep's ``report.html``: all of its jobs on one page, with links to the report of each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from robust_train.files import strict_json
from robust_train.folder.lock import is_held
from robust_train.model.json import as_json
from robust_train.readable import duration, number, percent
from robust_train.report.charts import Chart, Point, curves_of_jobs, value_over
from robust_train.report.facts import Advice, Story, Use
from robust_train.report.html import FILE_NAME, render, shares, try_to_save
from robust_train.report.sources import read_sources
from robust_train.report.story import story_of
from robust_train.sweep.points import STUDY_FILE
from robust_train.sweep.pruning import Reports, Values
from robust_train.sweep.record import (
    COMPLETED,
    ENDED,
    PRUNED,
    SWEEP_FILE,
    SweepJob,
    SweepTable,
    as_number,
    best_first,
    differing_overrides,
    job_folders,
    read_record,
    read_row,
    read_table,
    tally,
)

SCHEMA = 1
_MOST_PARAMETERS = 8

Curves = list[Sequence[Point]]


@dataclass(frozen=True)
class JobStory:
    """One job of a sweep: its row, and its story if it left a journal."""

    row: SweepJob
    story: Story | None = field(default=None, repr=False)

    @property
    def is_pruned(self) -> bool:
        """Whether it was stopped early."""
        return self.row.status == PRUNED

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


def importances(folder: Path) -> dict[str, float]:
    """Return which share of the value each parameter of a search explains, by Optuna."""
    if not (folder / STUDY_FILE).exists():
        return {}
    with contextlib.suppress(Exception):  # without Optuna, or of too few trials
        from robust_train.sweep.search import importances_in

        return importances_in(folder)
    return {}


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
    reports = Reports(Path(sweep.folder)).values
    curves = [(job.label, _values(reports, job), job.is_pruned) for job in sweep.jobs]
    losses = [(job.label, _losses(job), job.is_pruned) for job in sweep.jobs]
    return render(
        "sweep.html.j2",
        title=sweep.name,
        sweep=sweep,
        shares=shares(sweep.seconds),
        rows=[
            (job, own, _href(sweep, job))
            for job, own in zip(sweep.jobs, overrides, strict=True)
        ],
        hours=_hours(sweep.jobs),
        values=[
            *filter(None, [curves_of_jobs("Value", curves)]),
            *_over_parameters(sweep, reports),
        ],
        loss=curves_of_jobs(
            "Loss",
            losses,
            may_be_log=True,
        ),
        advice=_advice(sweep.jobs),
    )


def _values(reports: Values, job: JobStory) -> Curves:
    """Return what a job has reported."""
    own = reports.get(job.row.job or 0)
    return [tuple(own.items())] if own else []


def _losses(job: JobStory) -> Curves:
    """Return the curves of the loss of training that were not lost."""
    curves = () if job.story is None else job.story.curves
    own = [c for c in curves if c.name in ("loss", "train_loss") and not c.lost]
    return [curve.points for curve in own if curve.name == own[0].name]


def _hours(jobs: Sequence[JobStory]) -> str:
    """Return how long the jobs trained, and what pruning has saved: the rest of the completed
    ones' mean."""

    def hours(is_pruned: bool) -> list[float]:
        rows = [job.row for job in jobs if job.is_pruned is is_pruned]
        return [
            (row.wall_seconds - (row.wait_seconds or 0.0)) / 3600 * row.gpus
            for row in rows
            if row.wall_seconds is not None
        ]

    pruned, others = hours(True), hours(False)
    if not (pruned or others):
        return ""
    on_gpus = any("cuda" in device for job in jobs for device in job.row.devices)
    unit = "GPU-hours" if on_gpus else "hours on the CPU"
    text = f"{number(sum(pruned) + sum(others))} {unit}"
    if not pruned or not others:
        return f"{text}."
    saved = sum(max(fmean(others) - each, 0.0) for each in pruned)
    return (
        f"{text}, {number(sum(pruned))} of them in pruned jobs; to prune them saved about "
        f"{number(saved)}."
    )


def _over_parameters(sweep: SweepStory, reports: Values) -> list[Chart]:
    """Draw the value of each job over each parameter that differs, the most important first."""
    points: dict[str, list[tuple[str, float, bool]]] = {}
    for row in (job.row for job in sweep.jobs):
        value = as_number(row.result) if row.status == COMPLETED else None
        if row.status == PRUNED and (reported := reports.get(row.job or 0)):
            value = [*reported.values()][-1]
        if value is None:
            continue
        for override in row.overrides:
            key, _, text = override.partition("=")
            points.setdefault(key, []).append((text, value, row.status == PRUNED))
    varied = {k: own for k, own in points.items() if len({t for t, _, _ in own}) > 1}
    shares = importances(Path(sweep.folder))
    keys = sorted(varied, key=lambda key: -shares.get(key, 0.0))[:_MOST_PARAMETERS]
    return [
        value_over(
            f"Value over {key}",
            varied[key],
            f"Importance {percent(shares[key])}." if key in shares else "",
        )
        for key in keys
    ]


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
