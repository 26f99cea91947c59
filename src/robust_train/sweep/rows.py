"""A sweep's jobs as rows: read from their run folders, whichever launcher ran them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from robust_train.runfolder.summary import objective_of
from robust_train.sweep.record import (
    COMPLETED,
    DIED,
    INTERRUPTED,
    NOT_STARTED,
    STARTED,
    JobRecord,
    read_json,
    read_record,
)

_EXIT_CODES = {COMPLETED: 0, "no_device": 75, INTERRUPTED: 143}


@dataclass(frozen=True)
class Row:
    """One job of a sweep, as ``sweep.json`` has it.

    Attributes:
        job: its number, None where it is not known.
        overrides: what was typed for it.
        status: ``completed``, ``failed``, ``no_device``, ``interrupted``, ``refused``, ``died``
            (without a summary) or ``not_started``.
        exit_code: what the job alone would have exited with, None if it was not started.
        attempts: how many there were.
        devices: those of the attempts, in order, each once.
        batch_size: micro-batch of the last attempt.
        result: the objective.
        wall_seconds: from the job's start to its end.
        wait_seconds: of those, waiting for a GPU.
        reason: one sentence for any status but ``completed``.
        reused: completed in an earlier launch of the sweep, not run again.
        folder: its run folder, None for a job that was not started.
    """

    job: int | None
    overrides: tuple[str, ...]
    status: str
    exit_code: int | None
    attempts: int
    devices: tuple[str, ...]
    batch_size: int | None
    result: Any
    wall_seconds: float | None
    wait_seconds: float | None
    reason: str | None
    reused: bool
    folder: str | None

    def as_json(self) -> dict[str, Any]:
        """The row with JSON's types."""
        return asdict(self)


def row_of(
    folder: Path | None,
    record: JobRecord | None,
    summary: Mapping[str, Any] | None,
    overrides: Sequence[str] = (),
) -> Row:
    """The row of one job.

    Args:
        folder: its run folder.
        record: its record, None for a job whose sweep keeps none.
        summary: its ``summary.json``, None without one.
        overrides: what was typed for it, where there is no record.
    """
    ended = None if record is None or record.status == STARTED else record
    told = summary or {}
    status = ended.status if ended is not None else str(told.get("status") or DIED)
    reason = ended.reason if ended is not None else told.get("reason")
    if status == DIED and reason is None:
        reason = "its process ended without a summary"
    exit_code = ended.exit_code if ended is not None else _EXIT_CODES.get(status, 1)
    result = objective_of(told["result"]) if "result" in told else record and record.objective
    listed = told.get("attempts")
    attempts = [a for a in listed if isinstance(a, dict)] if isinstance(listed, list) else []
    return Row(
        job=None if record is None else record.number,
        overrides=tuple(overrides) if record is None else record.overrides,
        status=status,
        exit_code=None if status == NOT_STARTED else exit_code,
        attempts=len(attempts),
        devices=tuple(dict.fromkeys(str(attempt.get("device")) for attempt in attempts)),
        batch_size=attempts[-1].get("batch_size") if attempts else None,
        result=result if status == COMPLETED else None,
        wall_seconds=told.get("wall_seconds"),
        wait_seconds=told.get("wait_seconds"),
        reason=None if status == COMPLETED else reason,
        reused=record is not None and record.reused,
        folder=None if folder is None else str(folder),
    )


def read_row(folder: Path) -> Row:
    """The row of the job in ``folder``, as far as it can be read."""
    record = read_record(folder)
    overrides = () if record is not None else _typed_overrides(folder)
    return row_of(folder, record, read_json(folder / "summary.json"), overrides)


def read_rows(sweep_folder: Path, sweep: str, since_ns: int) -> list[Row]:
    """The rows of the jobs that belong to this launch of a sweep, by number.

    Args:
        sweep_folder: where to look; a repeated sweep may have left folders of other jobs there.
        sweep: this launch.
        since_ns: a job without a record belongs to it if Hydra wrote its folder later than this.
    """
    rows = []
    for folder in job_folders(sweep_folder):
        record = read_record(folder)
        if record.sweep == sweep if record is not None else _is_newer(folder, since_ns):
            rows.append(read_row(folder))
    return sorted(rows, key=lambda row: (row.job is None, row.job or 0, _natural(row.folder or "")))


def has_failed(sweep_folder: Path, sweep: str) -> bool:
    """Whether a job of this launch has ended otherwise than completed."""
    records = (read_record(folder) for folder in job_folders(sweep_folder))
    return any(r is not None and r.sweep == sweep and r.exit_code for r in records)


def exit_code_of(rows: Sequence[Row]) -> int:
    """That of the first job which did not complete, one that failed by itself going before one
    that was only stopped with the sweep."""
    codes = [row.exit_code for row in rows if row.exit_code and row.status != INTERRUPTED]
    stopped = [row.exit_code for row in rows if row.exit_code]
    return next(iter(codes + stopped), 0)


def job_folders(sweep_folder: Path) -> Iterator[Path]:
    """Every run folder under a sweep's folder; ``hydra.sweep.subdir`` may have several levels."""
    for place, names, files in os.walk(sweep_folder):
        if ".hydra" in names or "sweep_job.json" in files:
            names.clear()  # no job lies inside another
            yield Path(place)
        else:
            names[:] = sorted(name for name in names if not name.startswith("."))


def _typed_overrides(folder: Path) -> tuple[str, ...]:
    try:
        content = OmegaConf.load(folder / ".hydra" / "overrides.yaml")
    except (OSError, ValueError, OmegaConfBaseException):
        return ()
    return tuple(map(str, content)) if isinstance(content, ListConfig) else ()


def _is_newer(folder: Path, since_ns: int) -> bool:
    try:
        return (folder / ".hydra" / "overrides.yaml").stat().st_mtime_ns >= since_ns
    except OSError:
        return False


def _natural(name: str) -> tuple[int, str]:
    return len(name), name
