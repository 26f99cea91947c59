"""Formats a sweep's jobs as text: tables for the screen, and ``sweep.csv``.

The sweep's process uses it during the sweep and at its end, and so do the commands that list jobs,
such as ``robust-train ps``. No function here reads or writes files.
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
_LONGEST_RESULT = 40  # characters of a result in a table


def values_of(rows: Sequence[SweepJob]) -> list[float]:
    """Return those results of completed jobs that are numbers."""
    return [row.value for row in rows if row.value is not None]


def best_first(table: SweepTable) -> list[list[SweepJob]]:
    """Return the jobs of each combination of values, the best combination first.

    With ``repeat``, a combination has several jobs with different seeds. Combinations without a
    result come last.
    """
    combinations: dict[int, list[SweepJob]] = {}
    for row in table.jobs:
        combinations.setdefault(row.job // table.repeat, []).append(row)

    def rank(rows: list[SweepJob]) -> float:
        values = values_of(rows)
        if not values:
            return math.inf
        return -table.sign * fmean(values)

    return sorted(combinations.values(), key=rank)


def seeds_table(combinations: Sequence[Sequence[SweepJob]]) -> list[str]:
    """Return a line for each combination of values: the mean over its seeds, and failed seeds."""
    shared_by_seeds = []
    for rows in combinations:
        overrides = [row.overrides for row in rows]
        shared_by_seeds.append(common(overrides))
    shared_by_all = common(shared_by_seeds)
    lines: list[Sequence[object]] = []
    for rows, shared in zip(combinations, shared_by_seeds, strict=True):
        values = values_of(rows)
        result = "-"
        if values:
            result = f"{fmean(values):.6g}"
        if len(values) > 1:
            result += f" ± {stdev(values):.3g}"
        failed_seeds = [without(row.overrides, shared) for row in rows if row.exit_code]
        missing = ""
        if failed_seeds:
            missing = f"without {', '.join(failed_seeds)}"
        lines.append(
            (
                rows[0].trial,
                result,
                f"{len(values)} of {len(rows)}",
                without(shared, shared_by_all),
                missing,
            )
        )
    return align_columns(lines, ("trial", "mean ± std", "seeds", "overrides", ""))


def screen_table(rows: Sequence[SweepJob], values: Mapping[int, float] | None = None) -> list[str]:
    """Return jobs in plain columns, with only the overrides in which they differ.

    ``values`` has the last reported value of each running job, by its number. If it is given, only
    running jobs are shown.
    """
    shared = common([row.overrides for row in rows])
    lines = []
    for row in rows:
        if values is None or row.is_running:
            overrides = without(row.overrides, shared)
            lines.append(_cells(row, overrides, values or {}))
    return align_columns(lines, COLUMNS)


def _cells(row: SweepJob, overrides: str, values: Mapping[int, float]) -> list[object]:
    """Return the cells of a job in the order of `COLUMNS`."""
    status = row.status.replace("_", " ")
    if row.reused:
        status += " earlier"
    result = values.get(row.job) if row.is_running else row.result
    if result is None:
        # joblib and submitit print a job's failure into another file, so the table shows it.
        result = row.reason
    time = None
    if row.wall_seconds is not None:
        time = f"{row.wall_seconds:.1f} s"
    return [
        row.job,
        status,
        row.attempts or None,
        ",".join(row.devices),
        row.batch_size,
        of_all(row.step, row.total_steps),
        short_result(result),
        time,
        overrides,
    ]


def common(overrides: Sequence[Sequence[str]]) -> list[str]:
    """Return the overrides that all jobs share. For a single job the list is empty."""
    if len(overrides) < 2:
        return []
    shared = set(overrides[0]).intersection(*overrides)
    return [override for override in overrides[0] if override in shared]


def without(overrides: Sequence[str], others: Sequence[str]) -> str:
    """Return ``overrides`` except for ``others`` as text. Secrets are hidden."""
    rest = [override for override in overrides if override not in others]
    return " ".join(public_command(rest))


def title(table: SweepTable) -> str:
    """Return the line above a sweep's table, which explains its order."""
    if not values_of(table.jobs):
        return "sweep:"
    return f"sweep, the {table.best_is} result first:"


def tally(rows: Sequence[SweepJob]) -> str:
    """Count the jobs by their status, in one line."""
    counts = Counter(row.status.replace("_", " ") for row in rows)
    completed = counts.pop(Status.COMPLETED, 0)
    text = f"{completed} of {len(rows)} completed"
    for status, count in sorted(counts.items()):
        text += f", {count} {status}"
    return text


def explain_unranked(rows: Sequence[SweepJob]) -> list[str]:
    """Return a line for each reason why completed jobs have no rank.

    If no job has a result, the sweep needs no ranks, and the list is empty.
    """
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
    """Return whether any job has returned a result."""
    return any(row.result is not None for row in rows)


def as_csv(rows: Sequence[SweepJob]) -> str:
    """Return the content of ``sweep.csv``: a header, then a line for each job."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].as_row(), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: _csv_value(value) for key, value in row.as_row().items()})
    return text.getvalue()


def _csv_value(value: Any) -> Any:
    """Return a value for a cell: lists of texts joined by spaces, other structures as JSON."""
    is_list = isinstance(value, (tuple, list))
    if is_list and all(isinstance(item, str) for item in value):
        return " ".join(value)
    if is_list or isinstance(value, (dict, bool)):
        return json.dumps(value, ensure_ascii=False)
    return value


def short_result(result: Any) -> str:
    """Return a result as short text for a table."""
    if result is None:
        return "-"
    if isinstance(result, float):
        return f"{result:.6g}"
    if not isinstance(result, str):
        result = json.dumps(result, ensure_ascii=False)
    return shorten(result, _LONGEST_RESULT)
