"""Which jobs of a sweep are stopped early, by the values that they have reported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from robust_train.files import parse_json
from robust_train.model.events import MalformedEvent, ValueReported, parse
from robust_train.sweep.record import job_folders, read_record

Values = Mapping[int, Mapping[int, float]]
"""What each job has reported at each step, in order, by its number."""


class Reports:
    """What the jobs of the sweep in ``folder`` have reported, as their journals have it.

    ``mode`` (``min`` or ``max``): figures that no one has named, and whose best is the other way
    round, are left out; None: none are.
    """

    def __init__(
        self,
        folder: Path,
        mode: str | None = None,
    ) -> None:
        self._mode, self.has_left_out = mode, False
        self.values: dict[int, dict[int, float]] = {}
        self._read: dict[int, int] = {}  # bytes of each job's journal
        for each in job_folders(folder):
            record = read_record(each)
            if record is not None and record.job is not None:
                self.new(record.job, each)

    def new(
        self,
        job: int,
        folder: Path,
    ) -> list[ValueReported]:
        """Return what a job has reported since the last time."""
        start, found = self._read.get(job, 0), list[ValueReported]()
        with (
            contextlib.suppress(OSError),
            (folder / "journal.jsonl").open("rb") as file,
        ):
            if file.seek(0, 2) == start:
                return []
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                start += len(line)
                if b'"report"' not in line:
                    continue
                with contextlib.suppress(ValueError, MalformedEvent):
                    event = parse(parse_json(line))
                    if not isinstance(event, ValueReported):
                        continue
                    if None in (self._mode, event.mode) or event.mode == self._mode:
                        found.append(event)
                    else:
                        self.has_left_out = True
        self._read[job] = start
        # a step that is done again after a resume is the same report
        self.values.setdefault(job, {}).update((one.step, one.value) for one in found)
        return found

    def is_behind(
        self,
        job: int,
        patience: int,
    ) -> bool:
        """Return whether a job was worse than another one for so many reports."""
        maximize = self._mode != "min"
        return is_out_of_patience(
            job,
            self.values,
            patience,
            maximize=maximize,
        )

    def forget(self, job: int) -> None:
        """Forget a job that starts afresh."""
        self._read.pop(job, None)
        self.values.pop(job, None)


def is_out_of_patience(
    job: int,
    values: Values,
    patience: int,
    *,
    maximize: bool,
) -> bool:
    """Return whether a job's best value was worse than that of another job, after as many reports,
    at each of its last ``patience`` reports. The best job never is."""
    sign = 1 if maximize else -1
    own = _best_so_far(values[job].values(), sign)
    if len(own) < patience:
        return False
    others = [_best_so_far(v.values(), sign) for j, v in values.items() if j != job]
    return all(
        any(len(other) > at and other[at] > own[at] for other in others)
        for at in range(len(own) - patience, len(own))
    )


def _best_so_far(values: Iterable[float], sign: int) -> list[float]:
    best: list[float] = []
    for value in values:
        best.append(max(sign * value, best[-1]) if best else sign * value)
    return best
