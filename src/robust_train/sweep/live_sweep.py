"""A sweep while it runs, and its end: the table on the screen, ``sweep.json`` and the report.

`sweep.session` creates a `Sweep` in the sweep's process before the first job starts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import socket
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from robust_train.children.notifier import Notifier
from robust_train.folder.lock import RunLock
from robust_train.folder.requests import SWEEP_FILE
from robust_train.folder.resume_command import repeated_with
from robust_train.model.errors import EXIT_FAILED
from robust_train.readable import duration, one_line
from robust_train.report.html import save
from robust_train.sweep.page import write_sweep_report
from robust_train.sweep.record import (
    Status,
    SweepJob,
    SweepTable,
    exit_code_of,
    is_taken_over,
    job_folders,
    read_rows,
)
from robust_train.sweep.table import (
    as_csv,
    best_first,
    explain_unranked,
    screen_table,
    seeds_table,
    tally,
    title,
)

log = logging.getLogger("robust_train")

LOST = (
    "%s: this sweep folder was removed, and another sweep has begun there; this sweep starts no "
    "more jobs and writes nothing more there"
)


@dataclass
class Sweep:
    """A running sweep."""

    table: SweepTable  # the content of ``sweep.json`` while the sweep runs
    folder: Path
    lock: RunLock  # of the folder; `GpuQueue`'s jobs are forks, so they hold it too
    notifier: Notifier
    known: dict[int, SweepJob] = field(default_factory=dict)  # the rows of `GpuQueue`
    started: float = field(default_factory=time.monotonic)
    pid: int = field(default_factory=os.getpid)

    def rows(self) -> list[SweepJob]:
        """Return the jobs so far, by number, including known jobs that left nothing on disk."""
        recorded = {row.job: row for row in read_rows(self.folder, self.table.sweep)}
        rows = self.known | recorded
        return [rows[number] for number in sorted(rows)]

    def show_and_write(self) -> int:
        """Show the table, write the files, and return the exit code that follows from the jobs."""
        rows = self.rows()
        if is_taken_over(self.folder, self.table.sweep):
            log.error(LOST, self.folder)
            return exit_code_of(rows) or EXIT_FAILED
        if all(row.status == Status.NOT_STARTED for row in rows):
            self._remove_table()
            return 0
        code = exit_code_of(rows)
        seconds = time.monotonic() - self.started
        table = replace(
            self.table,
            status=Status.ENDED,
            exit_code=code,
            wall_seconds=round(seconds, 3),
            jobs=tuple(rows),
        )
        summary = f"{tally(rows)} in {duration(seconds)}"
        try:
            table.write(self.folder)
            save(self.folder / "sweep.csv", as_csv(rows))
        except OSError as error:
            log.warning("cannot write a table to %s: %s", self.folder, error.strerror)
        write_sweep_report(self.folder)
        self._notify(table, summary)
        self._print_table(table, summary)
        return code

    def _remove_table(self) -> None:
        """Remove the ``sweep.json`` of a sweep that started no job.

        If the folder has jobs of an earlier launch, the file stays, because it has the command to
        resume them.
        """
        if not any(job_folders(self.folder)):
            with contextlib.suppress(OSError):
                (self.folder / SWEEP_FILE).unlink()

    def _notify(self, table: SweepTable, summary: str) -> None:
        """Send the user's notification of the end of the sweep."""
        unfinished = (Status.INTERRUPTED, Status.NOT_STARTED)
        event = "completed"
        if table.exit_code:
            is_interrupted = any(row.status in unfinished for row in table.jobs)
            event = "interrupted" if is_interrupted else "failed"
        host = socket.gethostname()
        # Overrides are left out, because they may contain a secret.
        jobs = [{"job": row.job, "status": row.status, "result": row.result} for row in table.jobs]
        self.notifier.send(
            event,
            f"sweep on {host}: {summary}; {self.folder}",
            {
                "sweep": table.sweep,
                "sweep_folder": str(self.folder),
                "exit_code": table.exit_code,
                "host": host,
                "jobs": jobs,
            },
        )

    def _print_table(self, table: SweepTable, summary: str) -> None:
        """Print the jobs, the best first, and the command to continue if some did not complete."""
        combinations = best_first(table)
        lines = [title(table)]
        lines += screen_table([row for seeds in combinations for row in seeds])
        if table.repeat > 1:
            lines += seeds_table(combinations)
        lines += explain_unranked(table.jobs)
        lines += [summary, f"sweep folder: {self.folder}"]
        if table.exit_code:
            command = f"robust-train resume {shlex.quote(str(self.folder))}"
            if table.resume_command is None:
                command = repeated_with(f"hydra.sweep.dir={self.folder}")
            lines.append(f"to continue: {command}")
        # Logging may still write into a job's log file after an interruption, so print.
        with contextlib.suppress(OSError, ValueError):
            print("\n".join(one_line(line) for line in lines), flush=True)
