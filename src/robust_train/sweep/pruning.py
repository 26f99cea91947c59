"""Which jobs of a sweep are stopped early, by the values that they have reported."""

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
    """The reports of a sweep's jobs, from their journals.

    ``mode`` (``min`` or ``max``) leaves out figures that no one named and that have the opposite
    direction. If it is empty, all figures count.
    """

    def __init__(self, mode: str = "") -> None:
        self._mode = mode
        self._has_warned = False
        # The values at each step, in order, by the job's number.
        self.values: dict[int, dict[int, float]] = {}
        self._read: dict[int, int] = {}  # bytes of each job's journal

    def begin(self, job: int, folder: Path) -> None:
        """Take what the folder of a job holds already: nothing of it is new."""
        self._read[job] = 0
        self.values[job] = {}
        self.new(job, folder)

    def new(self, job: int, folder: Path) -> list[ValueReported]:
        """Return what a job has reported since the last time."""
        data = b""
        reports = []
        with contextlib.suppress(OSError), (folder / _JOURNAL).open("rb") as file:
            file.seek(self._read[job])
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read[job] += len(whole)
        for line in whole.splitlines():
            if b'"report"' not in line:
                continue
            with contextlib.suppress(ValueError):
                event = parse(parse_json(line))
                if isinstance(event, ValueReported) and self._counts(event, job):
                    reports.append(event)
        # a step that is done again after a resume is the same report
        self.values[job].update((report.step, report.value) for report in reports)
        return reports

    def _counts(self, event: ValueReported, job: int) -> bool:
        if not self._mode or event.mode in (None, self._mode):
            return True
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "job %d reports a figure whose best is not its %simum, which this sweep wants: it "
                "is not looked at; objective= names another, sweep_direction= the other way",
                job,
                self._mode,
            )
        return False

    @property
    def last(self) -> dict[int, float]:
        """The last report of each job."""
        return {
            job: reports[next(reversed(reports))] for job, reports in self.values.items() if reports
        }

    def is_behind(self, job: int, patience: int) -> bool:
        """Return whether a job's best value was worse than another job's, after as many reports, at
        each of its last ``patience`` reports. False if that is 0, and for the best job."""
        if not patience:
            return False
        sign = -1 if self._mode == "min" else 1
        best = {}
        for number, each in self.values.items():
            signed = [sign * value for value in each.values()]
            best[number] = list(accumulate(signed, max))
        values = best.pop(job)
        if len(values) < patience:
            return False
        for at in range(len(values) - patience, len(values)):
            if not any(len(other) > at and other[at] > values[at] for other in best.values()):
                return False
        return True
