"""A sweep's ``report.html``: all of its jobs on a page, with links to the report of each."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from robust_train.compat import importances_of
from robust_train.files import strict_json
from robust_train.folder.lock import is_alive
from robust_train.model.json import as_json
from robust_train.readable import duration, number, percent
from robust_train.report.charts import Chart, Point, curves_of_jobs, value_over
from robust_train.report.facts import Story
from robust_train.report.html import FILE_NAME, render, try_to_save
from robust_train.report.sources import read_sources
from robust_train.report.story import story_of
from robust_train.sweep.pruning import Reports
from robust_train.sweep.record import (
    STUDY,
    STUDY_FILE,
    Status,
    SweepJob,
    SweepTable,
    read_rows,
    read_table,
    storage_in,
)
from robust_train.sweep.table import best_first, common, has_results, tally, values_of, without

SCHEMA = 1
_MOST_PARAMETERS = 8


@dataclass(frozen=True)
class JobStory:
    """One job of a sweep: its row, and its story if it left a journal."""

    row: SweepJob
    story: Story | None = field(default=None, repr=False)

    @property
    def hours(self) -> float:
        """How long the job held GPUs in all its launches, in GPU-hours. On the CPU, how long it
        ran."""
        if self.story is None or not self.story.seconds:
            return 0.0
        gpus = self.row.devices[-1].count(",") + 1 if self.row.devices else 1
        seconds = self.story.seconds
        return (seconds["wall"] - seconds["wait"]) / 3600 * gpus


@dataclass(frozen=True)
class SweepStory:
    """The facts of a sweep."""

    folder: str
    is_over: bool  # its end is recorded
    sentence: str  # what happened
    jobs: tuple[JobStory, ...]  # the best first

    @property
    def name(self) -> str:
        """That of its folder."""
        return Path(self.folder).resolve().name

    def as_json(self) -> Any:
        """Return the story in JSON's types, schema first."""
        content = {"schema": SCHEMA, "name": self.name, **vars(self)}
        jobs = [
            {"row": {**vars(job.row), **job.row.as_json()}, "story": job.story} for job in self.jobs
        ]
        return strict_json(as_json(content | {"jobs": jobs}))


def write_sweep_report(folder: Path) -> None:
    """Write ``report.html`` into a sweep folder. A failure costs a warning."""
    try_to_save(folder / FILE_NAME, lambda: sweep_page(sweep_story_of(folder)))


def sweep_story_of(folder: Path) -> SweepStory:
    """Return the story of the sweep in a folder, as far as it can be read."""
    table = read_table(folder)
    if not table:
        table = SweepTable("", "")
    # one that never started is in the table alone
    jobs = {row.job: JobStory(row) for row in table.jobs}
    for row in read_rows(folder, table.sweep):
        has_story = (row.path / "journal.jsonl").exists()
        story = story_of(read_sources(row.path)) if has_story else None
        jobs[row.job] = JobStory(row, story)
    rows = tuple(job.row for job in jobs.values())
    points = best_first(replace(table, jobs=rows))
    wall = table.wall_seconds
    sentence = tally(rows)
    sentence += "." if wall is None else f" in {duration(wall)}."
    if values_of(rows):
        sentence += f" The {table.best_is} result is the best."
    is_over = table.status == Status.ENDED
    if not is_over and is_alive(folder, has_ended=False):
        sentence += " It is still running."
    elif not is_over:
        sentence += " The end of the sweep is not recorded: its process was killed."
    return SweepStory(
        folder=str(folder),
        is_over=is_over,
        sentence=sentence,
        jobs=tuple(jobs[row.job] for of_point in points for row in of_point),
    )


def sweep_page(sweep: SweepStory) -> str:
    """Return the page of a sweep."""
    reports = Reports()
    values = []
    losses = []
    for job in sweep.jobs:
        reports.begin(job.row.job, job.row.path)
        label = str(job.row.job)
        reports_of_job = reports.values.get(job.row.job)
        curves = [tuple(reports_of_job.items())] if reports_of_job else []
        values.append((label, curves, job.row.is_pruned))
        losses.append((label, _losses(job.story), job.row.is_pruned))
    same = common([job.row.overrides for job in sweep.jobs])
    return render(
        "sweep.html.j2",
        title=sweep.name,
        sweep=sweep,
        has_results=has_results([job.row for job in sweep.jobs]),
        rows=[
            (
                job,
                without(job.row.overrides, same),
                # relative: both pages can be moved together
                os.path.join(os.path.relpath(job.row.path, sweep.folder), FILE_NAME)
                if job.story
                else "",
            )
            for job in sweep.jobs
        ],
        hours=_hours(sweep.jobs),
        values=curves_of_jobs("Value", values) + _over_parameters(sweep, reports.last),
        losses=curves_of_jobs("Loss", losses, may_be_log=True),
    )


def _losses(story: Story | None) -> list[Sequence[Point]]:
    """Return the curves of the loss of training that were not lost."""
    curves = () if story is None else story.curves
    losses = [c for c in curves if c.name in ("loss", "train_loss") and not c.lost]
    return [curve.points for curve in losses if curve.name == losses[0].name]


def _hours(jobs: Sequence[JobStory]) -> str:
    """Return how long the jobs held GPUs, and the time that pruning saved, assuming that pruned
    jobs would have trained as long as completed jobs."""
    spent = sum(job.hours for job in jobs)
    if not spent:
        return ""
    on_gpus = any("cuda" in device for job in jobs for device in job.row.devices)
    amount = number if on_gpus else _seconds_of
    text = f"{amount(spent)} {'GPU-hours' if on_gpus else 'on the CPU'}"
    pruned = [job.hours for job in jobs if job.row.is_pruned]
    done = [job.hours for job in jobs if job.row.has_completed]
    if not pruned or not done:
        return f"{text}."
    saved = sum(max(fmean(done) - each, 0.0) for each in pruned)
    return (
        f"{text}, {amount(sum(pruned))} of them in pruned jobs; to prune them saved about "
        f"{amount(saved)}."
    )


def _seconds_of(hours: float) -> str:
    return duration(3600 * hours)


def _over_parameters(sweep: SweepStory, last: Mapping[int, float]) -> list[Chart]:
    """Draw the value of each job over each parameter that differs, the most important first."""
    points = defaultdict[str, list[tuple[str, float, bool]]](list)
    for job in sweep.jobs:
        value = last.get(job.row.job) if job.row.is_pruned else job.row.value
        if value is not None:
            for override in job.row.overrides:
                key, _, text = override.partition("=")
                points[key].append((text, value, job.row.is_pruned))
    varied = {}
    for key, of_key in points.items():
        texts = {text for text, _, _ in of_key}
        if len(texts) > 1:
            varied[key] = of_key
    shares: dict[str, float] = {}
    if varied and (Path(sweep.folder) / STUDY_FILE).exists():
        # without Optuna, or of too few trials
        with contextlib.suppress(Exception):
            import optuna

            storage = storage_in(Path(sweep.folder))
            shares = importances_of(optuna.load_study(study_name=STUDY, storage=storage))
    keys = sorted(varied, key=lambda key: -shares.get(key, 0.0))[:_MOST_PARAMETERS]
    charts = []
    for key in keys:
        note = f"Importance {percent(shares[key])}." if key in shares else ""
        charts.append(value_over(f"Value over {key}", varied[key], note))
    return charts
