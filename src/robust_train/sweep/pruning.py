"""Decides which jobs of a sweep are stopped early, from the values that the jobs report.

`GpuQueue` reads the jobs' journals with it in the sweep's process, and a sweep's page shows the
values.
"""

from __future__ import annotations

import contextlib
import logging
from itertools import accumulate
from pathlib import Path

from robust_train.files import parse_json
from robust_train.model.events import ValueReported, parse

log = logging.getLogger("robust_train")

_JOURNAL = "journal.jsonl"


class Reports:
    """The values that a sweep's jobs have reported in their journals.

    Args:
        mode: ``min`` or ``max``, whichever value is best in this sweep. A figure whose best value
            is the opposite is left out. An empty mode leaves out nothing.

    Attributes:
        values: the value at each step, in order, by the job's number.
    """

    def __init__(self, mode: str = "") -> None:
        self._mode = mode
        self._has_warned = False
        self.values: dict[int, dict[int, float]] = {}
        self._bytes_read: dict[int, int] = {}  # of each job's journal

    def begin(self, job: int, folder: Path) -> None:
        """Read the values that a job's folder already has."""
        self._bytes_read[job] = 0
        self.values[job] = {}
        self.read_new(job, folder)

    def read_new(self, job: int, folder: Path) -> list[ValueReported]:
        """Read and return the values that a job has reported since the last call."""
        data = b""
        reports = []
        with contextlib.suppress(OSError), (folder / _JOURNAL).open("rb") as file:
            file.seek(self._bytes_read[job])
            data = file.read()
        # The job may still be writing the last line, which is read once it is complete.
        whole_lines = data[: data.rfind(b"\n") + 1]
        self._bytes_read[job] += len(whole_lines)
        for line in whole_lines.splitlines():
            if b'"report"' not in line:
                continue
            with contextlib.suppress(ValueError):
                event = parse(parse_json(line))
                if isinstance(event, ValueReported) and self._counts(event, job):
                    reports.append(event)
        # If a job repeats steps after it resumes, the later value of a step replaces the earlier.
        for report in reports:
            self.values[job][report.step] = report.value
        return reports

    def _counts(self, event: ValueReported, job: int) -> bool:
        """Return whether the best value of the figure is the best of this sweep."""
        if not self._mode or event.mode in (None, self._mode):
            return True
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "job %d reports a figure whose best value is not the %simum, as in this sweep; "
                "it is ignored: set objective to another figure, or change sweep_direction",
                job,
                self._mode,
            )
        return False

    @property
    def last(self) -> dict[int, float]:
        """The last value of each job that has reported any."""
        last_values = {}
        for job, values in self.values.items():
            if values:
                last_step = next(reversed(values))
                last_values[job] = values[last_step]
        return last_values

    def is_behind(self, job: int, patience: int) -> bool:
        """Return whether a job was worse than another job at its last ``patience`` reports.

        Jobs are compared by their best value up to the same number of reports. With ``patience`` 0,
        no job is behind.
        """
        if not patience:
            return False
        sign = -1 if self._mode == "min" else 1
        best_so_far = {}  # The best value after each report, by the job's number.
        for number, values in self.values.items():
            signed = [sign * value for value in values.values()]
            best_so_far[number] = list(accumulate(signed, max))
        bests = best_so_far.pop(job)
        if len(bests) < patience:
            return False
        for index in range(len(bests) - patience, len(bests)):
            others = [other[index] for other in best_so_far.values() if len(other) > index]
            is_worse = any(other > bests[index] for other in others)
            if not is_worse:
                return False
        return True
