"""Formats a sweep's jobs: tables for the screen, during the sweep and after it, and ``sweep.csv``.

Pure. The sweep's own process uses it, and so do the commands that list jobs, such as
``robust-train ps``.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from robust_train.folder.secrets import public_command
from robust_train.readable import align_columns, of_all, shorten
from robust_train.sweep.record import Status, SweepJob, SweepTable

COLUMNS = (
    "job",
    "status",
    "attempts",
    "devices",
    "micro-batch",
    "step",
    "result",
    "time",
    "overrides",
)
_LONGEST_RESULT = 40


def values_of(rows: Sequence[SweepJob]) -> list[float]:
    """Return the results of the jobs that completed, if they are numbers."""
    return [row.value for row in rows if row.value is not None]


def best_first(table: SweepTable) -> list[list[SweepJob]]:
    """Return the jobs of each point that a sweep has tried, with ``repeat`` several that differ in
    their seeds: the best first, what has no value last."""
    points: dict[int, list[SweepJob]] = {}
    for row in table.jobs:
        points.setdefault(row.job // table.repeat, []).append(row)

    def rank(rows: list[SweepJob]) -> float:
        values = values_of(rows)
        return -table.sign * fmean(values) if values else math.inf

    return sorted(points.values(), key=rank)


def point_table(points: Sequence[Sequence[SweepJob]]) -> list[str]:
    """Return the result of each point over its seeds, with the names of failed seeds."""
    lines: list[Sequence[object]] = []
    shared = []
    for rows in points:
        overrides = [row.overrides for row in rows]
        shared.append(common(overrides))
    everywhere = common(shared)
    for rows, common_overrides in zip(points, shared, strict=True):
        values = values_of(rows)
        spread = f" ± {stdev(values):.3g}" if len(values) > 1 else ""
        failed = ", ".join(
            without(row.overrides, common_overrides) for row in rows if row.exit_code
        )
        lines.append(
            (
                rows[0].trial,
                f"{fmean(values):.6g}{spread}" if values else "-",
                f"{len(values)} of {len(rows)}",
                without(common_overrides, everywhere),
                f"without {failed}" if failed else "",
            )
        )
    return align_columns(lines, ("trial", "mean ± std", "seeds", "overrides", ""))


def screen_table(rows: Sequence[SweepJob], values: Mapping[int, float] | None = None) -> list[str]:
    """Return jobs in plain columns, with only those overrides in which they differ.

    ``values`` has the last reports of jobs, by number. If given, only running jobs are shown.
    """
    same = common([row.overrides for row in rows])
    shown = [
        _cells(row, without(row.overrides, same), values or {})
        for row in rows
        if values is None or row.is_running
    ]
    return align_columns(shown, COLUMNS)


def _cells(row: SweepJob, overrides: str, values: Mapping[int, float]) -> list[object]:
    wall = row.wall_seconds
    result = values.get(row.job) if row.is_running else row.result
    return [
        row.job,
        f"{row.status.replace('_', ' ')}{' earlier' if row.reused else ''}",
        row.attempts or None,
        ",".join(row.devices),
        row.batch_size,
        of_all(row.step, row.total_steps),
        # other launchers' jobs say in files of their own why they ended
        short_result(row.reason if result is None else result),
        None if wall is None else f"{wall:.1f} s",
        overrides,
    ]


def common(overrides: Sequence[Sequence[str]]) -> list[str]:
    """Return the overrides that all jobs share, or none for a single job."""
    if len(overrides) < 2:
        return []
    everywhere = set(overrides[0]).intersection(*overrides)
    return [override for override in overrides[0] if override in everywhere]


def without(overrides: Sequence[str], others: Sequence[str]) -> str:
    """Return the overrides that are not among the others, without secrets, as a text."""
    return " ".join(public_command([override for override in overrides if override not in others]))


def title(table: SweepTable) -> str:
    """Return the line above a sweep's table, with what its order means."""
    if not values_of(table.jobs):
        return "sweep:"
    return f"sweep, the {table.best_is} result first:"


def tally(rows: Sequence[SweepJob]) -> str:
    """Count the jobs by the way they ended, in one line."""
    counts = Counter(row.status.replace("_", " ") for row in rows)
    done = counts.pop(Status.COMPLETED, 0)
    others = "".join(f", {n} {status}" for status, n in sorted(counts.items()))
    return f"{done} of {len(rows)} completed{others}"


def unranked(rows: Sequence[SweepJob]) -> list[str]:
    """Return a line for each reason why completed jobs have no rank, except for jobs without any
    result, which need no rank."""
    if not has_results(rows):
        return []
    jobs: dict[str, list[str]] = {}
    for row in rows:
        if row.has_completed and row.value is None:
            jobs.setdefault(str(row.why), []).append(str(row.job))
    lines = []
    for why, numbers in jobs.items():
        noun = "job" if len(numbers) == 1 else "jobs"
        lines.append(f"without a rank: {noun} {', '.join(numbers)}: {why}")
    return lines


def has_results(rows: Sequence[SweepJob]) -> bool:
    """Return whether any job has returned something."""
    return any(row.result is not None for row in rows)


def as_csv(rows: Sequence[SweepJob]) -> str:
    """Return the content of ``sweep.csv``: a line of names, then a line per job."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].as_row(), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: _cell(value) for k, value in row.as_row().items()})
    return text.getvalue()


def _cell(value: Any) -> Any:
    is_list = isinstance(value, (tuple, list))
    if is_list and all(isinstance(item, str) for item in value):
        return " ".join(value)
    if is_list or isinstance(value, (dict, bool)):
        return json.dumps(value, ensure_ascii=False)
    return value


def short_result(result: Any) -> str:
    """Return a result for a cell of a table."""
    if result is None:
        return "-"
    if isinstance(result, float):
        return f"{result:.6g}"
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    return shorten(text, _LONGEST_RESULT)
