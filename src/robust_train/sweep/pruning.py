"""Which jobs of a sweep are stopped early, by the values that they have reported."""

from __future__ import annotations

import contextlib
from itertools import accumulate
from pathlib import Path

from robust_train.files import parse_json
from robust_train.model.events import ValueReported, parse
from robust_train.sweep.record import job_folders, read_record


class Reports:
    """What the jobs of the sweep in ``folder`` have reported, as their journals have it.

    ``mode`` (``min`` or ``max``): figures that no one has named, and whose best is the other way
    round, are left out; None: none are.
    """

    def __init__(self, folder: Path, mode: str | None = None) -> None:
        self.mode, self.has_left_out = mode, False
        # at each step, in order, by the job's number
        self.values: dict[int, dict[int, float]] = {}
        self._read: dict[int, int] = {}  # bytes of each job's journal
        for each in job_folders(folder):
            record = read_record(each)
            if record is not None and record.job is not None:
                self.new(record.job, each)

    def new(self, job: int, folder: Path) -> list[ValueReported]:
        """Return what a job has reported since the last time."""
        path, start = folder / "journal.jsonl", self._read.get(job, 0)
        data = b""
        with contextlib.suppress(OSError):
            if path.stat().st_size > start:
                with path.open("rb") as file:
                    file.seek(start)
                    data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read[job] = start + len(whole)
        found = []
        for line in whole.splitlines():
            if b'"report"' not in line:
                continue
            with contextlib.suppress(ValueError):
                event = parse(parse_json(line))
                if not isinstance(event, ValueReported):
                    continue
                if None in (self.mode, event.mode) or event.mode == self.mode:
                    found.append(event)
                else:
                    self.has_left_out = True
        # a step that is done again after a resume is the same report
        self.values.setdefault(job, {}).update((one.step, one.value) for one in found)
        return found

    @property
    def last(self) -> dict[int, float]:
        """What each job has reported last."""
        known = self.values.items()
        return {job: next(reversed(own.values())) for job, own in known if own}

    def is_behind(self, job: int, patience: int | None) -> bool:
        """Return whether a job's best value was worse than that of another one, after as many
        reports, at each of its last ``patience`` reports. The best job never is."""
        if patience is None:
            return False
        sign = -1 if self.mode == "min" else 1
        best = {
            number: list(accumulate((sign * value for value in each.values()), max))
            for number, each in self.values.items()
        }
        own = best.pop(job)
        return len(own) >= patience and all(
            any(len(other) > at and other[at] > own[at] for other in best.values())
            for at in range(len(own) - patience, len(own))
        )

    def forget(self, job: int) -> None:
        """Forget a job that starts afresh."""
        self._read.pop(job, None)
        self.values.pop(job, None)
