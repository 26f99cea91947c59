"""Writes a sweep's ``report.html``: all jobs on one page, with links to their reports.

The sweep's process calls `write_sweep_report` when the sweep ends. ``robust-train report`` builds
the same page later.
"""

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

SCHEMA = 1  # of `SweepStory.as_json`
_MOST_PARAMETERS = 8  # that get a chart


@dataclass(frozen=True)
class JobStory:
    """A job of a sweep: its row of ``sweep.json``, and its story if it left a journal."""

    row: SweepJob
    story: Story | None = field(default=None, repr=False)

    @property
    def hours(self) -> float:
        """The GPU-hours of the job in all its launches, or the hours of a job on the CPU."""
        if self.story is None or not self.story.seconds:
            return 0.0
        gpus = self.row.devices[-1].count(",") + 1 if self.row.devices else 1
        seconds = self.story.seconds
        return (seconds["wall"] - seconds["wait"]) / 3600 * gpus


@dataclass(frozen=True)
class SweepStory:
    """The facts about a sweep that its page shows."""

    folder: str
    is_over: bool  # whether its end is recorded
    sentence: str  # a summary
    jobs: tuple[JobStory, ...]  # the best job first

    @property
    def name(self) -> str:
        """The name of the sweep's folder."""
        return Path(self.folder).resolve().name

    def as_json(self) -> Any:
        """Return the story in JSON's types. The schema comes first."""
        content = {"schema": SCHEMA, "name": self.name, **vars(self)}
        jobs = [
            {"row": {**vars(job.row), **job.row.as_json()}, "story": job.story} for job in self.jobs
        ]
        return strict_json(as_json(content | {"jobs": jobs}))


def write_sweep_report(folder: Path) -> None:
    """Write ``report.html`` into a sweep folder. A failure only costs a warning."""

    def build_page() -> str:
        return sweep_page(read_sweep_story(folder))

    try_to_save(folder / FILE_NAME, build_page)


def read_sweep_story(folder: Path) -> SweepStory:
    """Return the story of the sweep in a folder, as far as its files can be read."""
    table = read_table(folder)
    if table is None:
        table = SweepTable("", "")
    # A job that never started has no run folder, so only the table has it.
    jobs = {row.job: JobStory(row) for row in table.jobs}
    for row in read_rows(folder, table.sweep):
        story = None
        if (row.path / "journal.jsonl").exists():
            story = story_of(read_sources(row.path))
        jobs[row.job] = JobStory(row, story)
    rows = tuple(job.row for job in jobs.values())
    combinations = best_first(replace(table, jobs=rows))
    sentence = tally(rows)
    if table.wall_seconds is not None:
        sentence += f" in {duration(table.wall_seconds)}"
    sentence += "."
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
        jobs=tuple(jobs[row.job] for seeds in combinations for row in seeds),
    )


def sweep_page(sweep: SweepStory) -> str:
    """Return the page of a sweep, as HTML."""
    reports = Reports()
    rows = []
    values = []
    losses = []
    shared = common([job.row.overrides for job in sweep.jobs])
    for job in sweep.jobs:
        row = job.row
        rows.append((job, without(row.overrides, shared), _link_to_report(sweep, job)))
        reports.begin(row.job, row.path)
        reported = reports.values.get(row.job)
        curves = [tuple(reported.items())] if reported else []
        label = str(row.job)
        values.append((label, curves, row.is_pruned))
        losses.append((label, _loss_curves(job.story), row.is_pruned))
    return render(
        "sweep.html.j2",
        title=sweep.name,
        sweep=sweep,
        has_results=has_results([job.row for job in sweep.jobs]),
        rows=rows,
        hours=_describe_hours(sweep.jobs),
        values=curves_of_jobs("Value", values) + _draw_parameters(sweep, reports.last),
        losses=curves_of_jobs("Loss", losses, may_be_log=True),
    )


def _link_to_report(sweep: SweepStory, job: JobStory) -> str:
    """Return the relative path of a job's report, empty if there is none.

    With a relative path, the sweep's folder can be moved as a whole.
    """
    if job.story is None:
        return ""
    return os.path.join(os.path.relpath(job.row.path, sweep.folder), FILE_NAME)


def _loss_curves(story: Story | None) -> list[Sequence[Point]]:
    """Return the curves of the training loss, without steps that were lost in a failure."""
    if story is None:
        return []
    curves = [c for c in story.curves if c.name in ("loss", "train_loss") and not c.lost]
    return [curve.points for curve in curves if curve.name == curves[0].name]


def _describe_hours(jobs: Sequence[JobStory]) -> str:
    """Return the GPU-hours of the jobs, and an estimate of the hours that pruning saved.

    The estimate assumes that a pruned job would have trained as long as a completed job.
    """
    spent = sum(job.hours for job in jobs)
    if not spent:
        return ""
    is_on_gpus = any("cuda" in device for job in jobs for device in job.row.devices)

    def amount(hours: float) -> str:
        return number(hours) if is_on_gpus else duration(3600 * hours)

    unit = "GPU-hours" if is_on_gpus else "on the CPU"
    text = f"{amount(spent)} {unit}"
    pruned = [job.hours for job in jobs if job.row.is_pruned]
    completed = [job.hours for job in jobs if job.row.has_completed]
    if not pruned or not completed:
        return f"{text}."
    saved = sum(max(fmean(completed) - hours, 0.0) for hours in pruned)
    return (
        f"{text}, {amount(sum(pruned))} of them in pruned jobs; pruning saved about "
        f"{amount(saved)}."
    )


def _draw_parameters(sweep: SweepStory, last_values: Mapping[int, float]) -> list[Chart]:
    """Draw the jobs' values over each parameter that differs, the most important first."""
    points = defaultdict[str, list[tuple[str, float, bool]]](list)
    for job in sweep.jobs:
        row = job.row
        # A pruned job has no result, so its last report counts.
        value = last_values.get(row.job) if row.is_pruned else row.value
        if value is not None:
            for override in row.overrides:
                key, _, text = override.partition("=")
                points[key].append((text, value, row.is_pruned))
    varied = {}
    for key, points_of_key in points.items():
        texts = {text for text, _, _ in points_of_key}
        if len(texts) > 1:
            varied[key] = points_of_key
    importances: dict[str, float] = {}
    if varied and (Path(sweep.folder) / STUDY_FILE).exists():
        # Optuna may be missing here, and refuses to rank parameters after too few trials.
        with contextlib.suppress(Exception):
            import optuna

            storage = storage_in(Path(sweep.folder))
            importances = importances_of(optuna.load_study(study_name=STUDY, storage=storage))
    keys = sorted(varied, key=lambda key: -importances.get(key, 0.0))[:_MOST_PARAMETERS]
    charts = []
    for key in keys:
        note = ""
        if key in importances:
            note = f"Importance {percent(importances[key])}."
        charts.append(value_over(f"Value over {key}", varied[key], note))
    return charts
