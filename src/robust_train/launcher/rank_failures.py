"""``ranks/`` of a run folder: how the ranks of an engine's job have failed, for the next start.

``attempt-N.json`` is what rank 0 began attempt N with; ``attempt-N.rank-K.json`` is the failure
that rank K left before it ended. A rank that left none was killed. Nothing that is wrong with the
folder ends a rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
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
    """An attempt of an earlier start, and how its ranks failed."""

    attempt: Attempt
    endings: Mapping[int, RankEnding]  # by rank

    @property
    def was_stopped(self) -> bool:
        """Whether a signal stopped all ranks."""
        stopped = [one for one in self.endings.values() if one.was_stopped]
        return len(stopped) == self.attempt.spec.ranks

    def code_has_changed(self) -> bool:
        """Return whether a file of the trainer's differs from what has failed."""
        failure = self.attempt.failure
        root = None if failure is None else failure.rank
        code = (
            {} if root is None or root not in self.endings else self.endings[root].code
        )
        return any(_changed_at(path) != at for path, at in code.items())


def cause_of(failures: Mapping[int, RankEnding], ranks: int) -> Failure:
    """Return why an attempt failed: the earliest failure that is not the consequence of another's.

    Where all reports are consequences (a lost connection, a request to stop), a rank that left none
    was killed. If every rank was stopped, that is the reason. Pure.
    """
    killed = sorted({*range(ranks)} - {*failures})

    def order(one: RankEnding) -> tuple[int, float]:
        if one.event.failure.kind not in _FOLLOWS_FROM_OTHERS:
            return (0 if one.event.caused_by_rank is None else 1), one.at
        return (3 if one.was_stopped else 2), one.at

    reports = sorted(failures.values(), key=order)
    if reports and (not killed or order(reports[0])[0] < 2):
        root = reports[0]
        by = root.event.caused_by_rank if order(root)[0] == 1 else None
        return replace(root.event.failure, rank=root.rank if by is None else by)
    names = ", ".join(map(str, killed))
    one = len(killed) == 1
    return Failure(
        FailureKind.INTERRUPTED,
        f"rank {names} was killed" if one else f"ranks {names} were killed",
        Evidence(clue=Clue.KILLED),
        rank=killed[0] if one else None,
    )


class RankFailures:
    """The folder."""

    def __init__(self, run_dir: Path) -> None:
        self._journal = run_dir / "journal.jsonl"
        self._folder = run_dir / "ranks"

    def begin(
        self, number: int, job: str, spec: AttemptSpec, *, is_fresh: bool
    ) -> None:
        """Record what an attempt begins with; ``is_fresh``: earlier ones do not count any more."""
        content = {"job": job, "spec": asdict(replace(spec, gpus=()))}
        self._write(f"attempt-{number}.json", {**content, "is_fresh": is_fresh})

    def leave(self, number: int, rank: int, event: Failed) -> None:
        """Record how this rank's part of attempt ``number`` failed."""
        content = {
            "at": time.time(),
            "rank": rank,
            "code": _code(),
            "event": replace(event, error=None).as_json(),
        }
        self._write(f"attempt-{number}.rank-{rank}.json", content)

    def history(self, job: str, gpus: Group) -> Sequence[EarlierStart]:
        """Return the job's earlier attempts that count, the last one last."""
        attempts: dict[int, Attempt] = {}
        for number in sorted(self._numbers()):
            start = read_object(self._folder / f"attempt-{number}.json")
            if start.get("job") != job:
                continue
            with contextlib.suppress(MalformedEvent):
                spec = from_json(AttemptSpec, start.get("spec"))
                if start.get("is_fresh"):
                    attempts.clear()
                attempts[number] = Attempt(number, replace(spec, gpus=gpus))
        # how far they came is what rank 0 has journaled
        with contextlib.suppress(OSError):
            for content in filter(None, json_lines(self._journal)):
                which = content.get("attempt")
                if which in attempts:
                    with contextlib.suppress(MalformedEvent):
                        attempts[which] = attempts[which].after(parse(content))
        return [self._ended(attempt) for attempt in attempts.values()]

    def _numbers(self) -> list[int]:
        names = (
            path.stem.removeprefix("attempt-") for path in self._folder.glob("*.json")
        )
        return [int(name) for name in names if name.isdigit()]

    def _ended(self, attempt: Attempt) -> EarlierStart:
        endings: dict[int, RankEnding] = {}
        ranks = attempt.spec.ranks
        for rank in range(ranks):
            name = f"attempt-{attempt.number}.rank-{rank}.json"
            found = read_object(self._folder / name)
            with contextlib.suppress(MalformedEvent, KeyError, TypeError):
                event = parse(found["event"])
                if isinstance(event, Failed):
                    endings[rank] = RankEnding(rank, found["at"], event, found["code"])
        cause = cause_of(endings, ranks)
        return EarlierStart(replace(attempt, failure=cause, seconds=0.0), endings)

    def _write(self, name: str, content: Mapping[str, object]) -> None:
        try:
            self._folder.mkdir(exist_ok=True)
            write_json(self._folder / name, dict(content), durable=True)
        except OSError as error:
            log.warning("cannot write %s: %s", self._folder / name, error.strerror)


def _code() -> dict[str, float]:
    """Return the files outside of the installed libraries that this process has imported."""
    paths = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    ours = str(Path(__file__).parents[1])
    installed = (*(paths[name] for name in names), ours)
    found: dict[str, float] = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None) or ""
        at = _changed_at(path)
        if at is not None and not path.startswith(installed):
            found[path] = at
    return found


def _changed_at(path: str) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None
