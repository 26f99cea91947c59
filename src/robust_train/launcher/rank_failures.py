"""``ranks/`` of a run folder: how the ranks of an engine's job have failed, for the next start.

``attempt-N.json`` is what rank 0 began attempt N with; ``attempt-N.rank-K.json`` is the failure
that rank K left before it ended. A rank that left none was killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from robust_train.files import from_json, json_lines, read_object, write_json
from robust_train.model.attempt import Attempt
from robust_train.model.events import Failed, MalformedEvent, parse
from robust_train.model.failure import Clue, Evidence, Failure, FailureKind
from robust_train.model.gpu import Group
from robust_train.model.spec import AttemptSpec

log = logging.getLogger("robust_train")

Code = Mapping[str, float]
"""Files that a failed trainer was made of, and when each was changed last."""

_FOLLOWS_FROM_OTHERS = (FailureKind.COMM, FailureKind.INTERRUPTED)


@dataclass(frozen=True)
class RankStart:
    """What an attempt began with."""

    job: str
    spec: AttemptSpec
    is_fresh: bool = False  # what came before it does not count any more


@dataclass(frozen=True)
class RankEnding:
    """How one rank failed, by its own report."""

    rank: int
    at: float  # seconds since the epoch
    event: Failed
    code: Code = field(default_factory=dict)

    @property
    def was_stopped(self) -> bool:
        """Whether a signal stopped this rank."""
        return self.event.failure.kind is FailureKind.INTERRUPTED


@dataclass(frozen=True)
class EarlierStart:
    """An attempt of an earlier start, and what is known of the code that failed in it."""

    attempt: Attempt
    was_stopped: bool
    code: Code

    def code_has_changed(self) -> bool:
        """Return whether a file of the trainer's differs from what has failed."""
        return any(_changed_at(path) != at for path, at in self.code.items())


def cause_of(failures: Mapping[int, RankEnding], ranks: int) -> Failure:
    """Return why an attempt failed: the earliest failure that is not the consequence of another's.

    Where all reports are consequences (a lost connection, a request to stop), a rank that left none
    was killed. If every rank was stopped, that is the reason. Pure.
    """
    reports = sorted(failures.values(), key=lambda one: one.at)
    own = [one for one in reports if one.event.caused_by_rank is None]
    for one in own:
        if one.event.failure.kind not in _FOLLOWS_FROM_OTHERS:
            return replace(one.event.failure, rank=one.rank)
    for one in reports:
        if one.event.failure.kind not in _FOLLOWS_FROM_OTHERS:
            return replace(one.event.failure, rank=one.event.caused_by_rank)
    killed = sorted({*range(ranks)} - {*failures})
    if killed:
        names = ", ".join(map(str, killed))
        who = (
            f"rank {names} was killed"
            if len(killed) == 1
            else f"ranks {names} were killed"
        )
        rank = killed[0] if len(killed) == 1 else None
        return Failure(
            FailureKind.INTERRUPTED, who, Evidence(clue=Clue.KILLED), rank=rank
        )
    lost = next((one for one in reports if not one.was_stopped), reports[0])
    return replace(lost.event.failure, rank=lost.rank)


class RankFailures:
    """The folder. Nothing that is wrong with it ends a rank."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / "ranks"

    def begin(
        self, number: int, job: str, spec: AttemptSpec, *, is_fresh: bool
    ) -> None:
        """Record what attempt ``number`` begins with."""
        start = RankStart(job, replace(spec, gpus=()), is_fresh)
        self._write(f"attempt-{number}.json", asdict(start))

    def leave(self, number: int, rank: int, event: Failed) -> None:
        """Record how this rank's part of attempt ``number`` failed."""
        content = {"at": time.time(), "rank": rank, "code": _code()}
        event = replace(event, error=None)
        self._write(
            f"attempt-{number}.rank-{rank}.json", {**content, "event": event.as_json()}
        )

    def history(self, job: str, gpus: Group) -> tuple[EarlierStart, ...]:
        """Return the job's earlier attempts that count, the last one last."""
        starts: dict[int, RankStart] = {}
        for path in self._folder.glob("attempt-*.json"):
            number = path.stem.removeprefix("attempt-")
            with contextlib.suppress(MalformedEvent):
                if number.isdigit():
                    starts[int(number)] = from_json(RankStart, read_object(path))
        numbers = sorted(n for n, start in starts.items() if start.job == job)
        fresh = [number for number in numbers if starts[number].is_fresh]
        counted = [number for number in numbers if number >= max(fresh, default=0)]
        attempts = {n: Attempt(n, replace(starts[n].spec, gpus=gpus)) for n in counted}
        self._follow(attempts)
        return tuple(self._earlier(attempt) for attempt in attempts.values())

    def _follow(self, attempts: dict[int, Attempt]) -> None:
        """Fold into the attempts what rank 0 has journaled."""
        with contextlib.suppress(OSError):
            for content in filter(None, json_lines(self._run_dir / "journal.jsonl")):
                number = content.get("attempt")
                if number in attempts:
                    with contextlib.suppress(MalformedEvent):
                        attempts[number] = attempts[number].after(parse(content))

    def _earlier(self, attempt: Attempt) -> EarlierStart:
        failures: dict[int, RankEnding] = {}
        ranks = attempt.spec.ranks
        for rank in range(ranks):
            path = self._folder / f"attempt-{attempt.number}.rank-{rank}.json"
            found = read_object(path)
            with contextlib.suppress(MalformedEvent, KeyError, TypeError):
                event = parse(found["event"])
                if isinstance(event, Failed):
                    failures[rank] = RankEnding(rank, found["at"], event, found["code"])
        cause = cause_of(failures, ranks)
        stopped = len(failures) == ranks and all(
            one.was_stopped for one in failures.values()
        )
        root = failures.get(-1 if cause.rank is None else cause.rank)
        attempt = replace(attempt, failure=cause, seconds=0.0)
        return EarlierStart(attempt, stopped, {} if root is None else root.code)

    def _write(self, name: str, content: Mapping[str, object]) -> None:
        try:
            self._folder.mkdir(exist_ok=True)
            write_json(self._folder / name, dict(content), durable=True)
        except OSError as error:
            log.warning("cannot write %s: %s", self._folder / name, error.strerror)


def _code() -> dict[str, float]:
    """Return the files outside of the installed libraries that this process has imported."""
    paths = sysconfig.get_paths()
    installed = tuple(
        paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")
    )
    ours = str(Path(__file__).parents[1])
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    found: dict[str, float] = {}
    for path in filter(None, files):
        at = _changed_at(path)
        if at is not None and not path.startswith((*installed, ours)):
            found[path] = at
    return found


def _changed_at(path: str) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None
