"""A sweep's table for people and programs: columns on the screen, ``sweep.csv``, ``sweep.json``."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from robust_train.events import MalformedEvent, from_json
from robust_train.sweep.job_record import COMPLETED, read_json, write_json
from robust_train.sweep.rows import SweepRow

FILE = "sweep.json"
RUNNING, ENDED = "running", "ended"
COLUMNS = ("job", "overrides", "status", "attempts", "devices", "batch", "result", "wall")
CSV_COLUMNS = tuple(item.name for item in fields(SweepRow))
_LONGEST_RESULT = 40


@dataclass(frozen=True)
class SweepTable:
    """The content of ``sweep.json``; a sweep that runs has no rows yet."""

    sweep: str
    launcher: str
    status: str = RUNNING
    exit_code: int | None = None
    wall_seconds: float | None = None
    jobs: tuple[SweepRow, ...] = ()
    schema: int = 1

    def write(self, folder: Path) -> None:
        """Write ``sweep.json``; raise ``OSError`` if that is not possible."""
        write_json(folder / FILE, asdict(self))


def read_table(folder: Path) -> SweepTable | None:
    """Return the table in a sweep folder; None where there is none that can be read."""
    try:
        return from_json(SweepTable, read_json(folder / FILE))
    except MalformedEvent:
        return None


def screen_table(rows: Sequence[SweepRow]) -> str:
    """Return plain columns; of the overrides only those in which the jobs differ."""
    differing = differing_overrides([row.overrides for row in rows])
    lines = [COLUMNS]
    for row, overrides in zip(rows, differing, strict=True):
        lines.append(
            (
                "?" if row.job is None else str(row.job),
                " ".join(overrides),
                f"{row.status} earlier" if row.reused else row.status,
                str(row.attempts),
                ",".join(row.devices) or "-",
                "-" if row.batch_size is None else str(row.batch_size),
                short_result(row.result),
                "-" if row.wall_seconds is None else f"{row.wall_seconds:.1f} s",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    cells = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in cells)


def ending_line(row: SweepRow, log_path: Path) -> str:
    """Return the line for the screen when a job has ended."""
    if row.status == COMPLETED:
        seconds = "" if row.wall_seconds is None else f" in {row.wall_seconds:.1f} s"
        return f"job {row.job} completed{seconds}"
    reason = " ".join(str(row.reason).split())
    return f"job {row.job} {row.status}: {reason}; {log_path}"


def tally(rows: Sequence[SweepRow]) -> str:
    """Return one line: how many jobs ended how."""
    counts = Counter(row.status for row in rows)
    done = counts.pop(COMPLETED, 0)
    others = "".join(f", {n} {status.replace('_', ' ')}" for status, n in sorted(counts.items()))
    return f"{done} of {len(rows)} completed{others}"


def differing_overrides(overrides: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return each job's overrides without those that all have; a single job keeps its own."""
    if len(overrides) < 2:
        return [tuple(own) for own in overrides]
    common = set(overrides[0]).intersection(*overrides[1:])
    return [tuple(override for override in own if override not in common) for own in overrides]


def as_csv(rows: Sequence[SweepRow]) -> str:
    """Return the content of ``sweep.csv``: a line of names, then one line a job."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in rows:
        writer.writerow([_cell(getattr(row, name)) for name in CSV_COLUMNS])
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, (tuple, list)) and all(isinstance(item, str) for item in value):
        return " ".join(value)
    if isinstance(value, (dict, list, tuple, bool)):
        return json.dumps(value, ensure_ascii=False)
    return value


def short_result(result: Any) -> str:
    """Return a result for one cell of a table."""
    if result is None:
        return "-"
    if isinstance(result, float):
        return f"{result:.6g}"
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_RESULT else text[: _LONGEST_RESULT - 1] + "…"
