"""Reads and writes ``ranks/`` in a run folder: how earlier starts under an engine failed.

An engine such as torchrun restarts all ranks in new processes, so the folder carries the evidence
from one start to the next. ``attempt-N.json`` holds the start of attempt N, which rank 0 writes.
``attempt-N.rank-K.json`` holds the failure of rank K, which that rank writes before it ends. A rank
without such a file was killed. :mod:`.guest` calls it in the ranks' processes. A damaged file never
ends a rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from robust_train.files import json_lines, read_object, write_json
from robust_train.launcher.inline import find_user_modules
from robust_train.launcher.rank_ends import RankEnd
from robust_train.model.attempt import Attempt
from robust_train.model.events import Failed, MalformedEventError, parse
from robust_train.model.failure import Clue, Evidence, Failure, FailureKind
from robust_train.model.gpu import Group
from robust_train.model.spec import AttemptSpec

log = logging.getLogger("robust_train")


@dataclass(frozen=True)
class EarlierStart:
    """An attempt of an earlier start, and how its ranks failed."""

    attempt: Attempt
    # The source files of the failed rank's trainer, with the time of each file's last change.
    code: Mapping[str, float]

    @property
    def was_stopped(self) -> bool:
        """Whether a signal stopped all ranks, and no rank was killed or failed."""
        is_stop = self.attempt.kind is FailureKind.INTERRUPTED
        return is_stop and self.attempt.evidence.clue != Clue.KILLED

    def code_has_changed(self) -> bool:
        """Return whether any of the trainer's files has changed since the failure."""
        return any(_read_change_time(path) != at for path, at in self.code.items())


class RankFailures:
    """The folder ``ranks/`` in a run folder."""

    def __init__(self, run_dir: Path) -> None:
        self._journal = run_dir / "journal.jsonl"
        self._folder = run_dir / "ranks"

    def record_failure(self, number: int, rank: int, event: Failed) -> None:
        """Record how this rank's part of attempt ``number`` failed."""
        content = {
            "at": time.time(),
            "rank": rank,
            "code": _list_code(),
            "event": replace(event, error="").as_json(),
        }
        self.write(f"attempt-{number}.rank-{rank}.json", content)

    def read_history(self, job: str, gpus: Group) -> Sequence[EarlierStart]:
        """Return the job's earlier attempts that count, oldest first, as attempts on these GPUs."""
        attempts = self._read_starts(job, gpus)
        # Rank 0's journal shows the progress of these attempts.
        with contextlib.suppress(OSError):
            for content in json_lines(self._journal):
                number = content.get("attempt") if content else None
                if number in attempts:
                    with contextlib.suppress(MalformedEventError):
                        attempts[number] = attempts[number].after(parse(content))
        return [self._add_failure(attempt) for attempt in attempts.values()]

    def _read_starts(self, job: str, gpus: Group) -> dict[int, Attempt]:
        """Return the job's attempts by number, since the user last started the job afresh."""
        attempts: dict[int, Attempt] = {}
        names = [path.stem.removeprefix("attempt-") for path in self._folder.glob("*.json")]
        for number in sorted(int(name) for name in names if name.isdigit()):
            start = read_object(self._folder / f"attempt-{number}.json")
            if start.get("job") != job:
                continue
            with contextlib.suppress(MalformedEventError):
                spec = AttemptSpec.from_fields(start.get("spec"))
                if start.get("is_fresh"):
                    attempts.clear()
                attempts[number] = Attempt(number, replace(spec, gpus=gpus))
        return attempts

    def _add_failure(self, attempt: Attempt) -> EarlierStart:
        """Return an earlier attempt with its failure, which the files of its ranks show."""
        ends: list[RankEnd] = []
        code: dict[int, dict[str, float]] = {}
        for rank in range(attempt.spec.ranks):
            name = f"attempt-{attempt.number}.rank-{rank}.json"
            content = read_object(self._folder / name)
            end = RankEnd(rank)
            with contextlib.suppress(MalformedEventError, KeyError, TypeError):
                event = parse(content["event"])
                if isinstance(event, Failed):
                    code[rank] = dict(content["code"])
                    end = replace(end, ending=event, at=float(content["at"]))
            ends.append(end)
        failure = find_cause(ends)
        attempt = replace(attempt, failure=failure, seconds=0.0)
        return EarlierStart(attempt, code.get(failure.rank or 0, {}))

    def write(self, name: str, content: Mapping[str, object]) -> None:
        """Write a file into the folder, or log a warning if the disk refuses it."""
        try:
            self._folder.mkdir(exist_ok=True)
            write_json(self._folder / name, dict(content), durable=True)
        except OSError as error:
            path = self._folder / name
            log.warning("cannot write %s: %s", path, error.strerror)


def find_cause(ends: Sequence[RankEnd]) -> Failure:
    """Return why an attempt failed: the earliest failure that does not follow from another rank's.

    If all reported failures follow from another rank's failure, the ranks without a report were
    killed, which is the cause. If a signal stopped every rank, the stop is the cause.
    """
    counted = [end for end in ends if not end.was_stopped] or ends
    root = min(counted, key=lambda end: end.order)
    if root.report is not None:
        return root.report.failure
    killed = [str(end.rank) for end in ends if end.ending is None]
    evidence = Evidence(clue=Clue.KILLED)
    if len(killed) == 1:
        message = f"rank {killed[0]} was killed"
        return Failure(FailureKind.INTERRUPTED, message, evidence, rank=root.rank)
    message = f"ranks {', '.join(killed)} were killed"
    return Failure(FailureKind.INTERRUPTED, message, evidence)


def _list_code() -> dict[str, float]:
    """Return the user's files that this process runs or has imported, with their change times."""
    main = getattr(sys.modules["__main__"], "__file__", None) or ""
    files = [main] + [path for _, path in find_user_modules()]
    times = {path: _read_change_time(path) for path in files}
    return {path: at for path, at in times.items() if at}


def _read_change_time(path: str) -> float:
    """Return when a file was last changed, 0 if it does not exist."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
