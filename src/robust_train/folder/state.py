"""Writes and reads ``state.json`` and ``summary.json``: the state of a job, and its result.

The launcher keeps ``state.json`` up to date during a launch, and writes ``summary.json`` at the
job's end. Commands, sweeps and reports read both.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from robust_train.files import parse_json, read_small, strict_json, sync, write_json
from robust_train.model.attempt import Attempt
from robust_train.model.errors import (
    EXIT_FAILED,
    EXIT_TRY_LATER,
    AttemptsExhaustedError,
    NoDeviceError,
    RunFolderLostError,
    TrainerFailedError,
)
from robust_train.model.events import SCHEMA, CheckpointSaved, Event, JobStarted, Json, PauseLearned
from robust_train.model.failure import MEMORY_FAILURES
from robust_train.model.json import as_json, from_json
from robust_train.readable import counted, duration, shorten

log = logging.getLogger("robust_train")

STATE_FILE = "state.json"
FINAL = frozenset({"completed", "failed", "no_device", "interrupted", "pruned"})
# Exit codes by the status of a job. The exit code of an interrupted job depends on the signal.
EXIT_CODES = {"completed": 0, "pruned": 0, "failed": EXIT_FAILED, "no_device": EXIT_TRY_LATER}
_INTERVAL_SECONDS = 1.0
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class RunState:
    """The content of ``state.json``: the state of a job. Times are seconds since the epoch.

    Attributes:
        id: the job's id in all its launches: the first eight digits of `job`.
        name: `job_name`, or the name of the model and data set, the function or the script.
        run_dir: the path of the folder when the job started.
        pid: the launcher's process on `host`.
        host: the launcher's host.
        user: the name of the job's user.
        started: when this launch began.
        since: when the job entered this state.
        state: `starting`, `waiting`, `running`, `between attempts` or `stopping`. After the end of
            the job: `completed`, `failed`, `no_device`, `interrupted` or `pruned`.
        updated: when the file was written.
        schema: version of the format.
        earlier_ids: ids of earlier jobs in this folder.
        working_directory: the directory in which the command was run.
        ended: when the job ended. None before the end.
        job: identity of the job in all its launches.
        earlier_seconds: duration of the job's earlier launches.
        waiting: the wait for a GPU: `position`, `reason`, `seconds_left` (null for a wait without
            a time limit, after a time slice).
        attempt: the record of the last attempt, as in `summary.json`.
        checkpoint: the last checkpoint that was reported.
        checkpoint_step: the step of that checkpoint.
        longest_pause: the longest time between two reports of progress, in seconds.
        reason: why the last attempt, or the job, ended.
        exit_code: None until the job has ended.
        resume_command: the command that `robust-train resume` runs. None if the job was started
            without a command of this package, by an engine such as torchrun, or with a secret.
        was_asked_to_end: whether a person asked the job to end, as far as is known.
    """

    id: str
    name: str
    run_dir: str
    pid: int
    host: str
    user: str
    started: float
    since: float
    state: str = "starting"
    updated: float = 0.0
    schema: int = SCHEMA
    earlier_ids: tuple[str, ...] = ()
    working_directory: str = ""
    ended: float | None = None
    job: str | None = None
    earlier_seconds: float = 0.0
    waiting: Mapping[str, Json] | None = None
    attempt: Attempt | None = None
    checkpoint: str | None = None
    checkpoint_step: int | None = None
    longest_pause: float | None = None
    reason: str | None = None
    exit_code: int | None = None
    resume_command: str | None = None
    was_asked_to_end: bool = False

    def seconds(self, now: float) -> float:
        """Return the duration of all launches of the job until its end, or ``now``."""
        end = now if self.ended is None else self.ended
        return max(self.earlier_seconds + end - self.started, 0.0)

    @property
    def is_final(self) -> bool:
        """Whether the job has ended."""
        return self.state in FINAL

    @classmethod
    def read(cls, data: bytes | str) -> RunState | None:
        """Return the state in a file's content, None if it is damaged or has another schema."""
        try:
            state = from_json(cls, parse_json(data))
        except ValueError:  # includes MalformedEventError
            return None
        return state if state.schema == SCHEMA else None

    def after(self, event: Event) -> RunState:
        """Return the state after an event of the job or its attempt."""
        state = self
        if self.attempt is not None:
            state = replace(self, attempt=self.attempt.after(event))
        match event:
            case CheckpointSaved(path=path, step=step):
                return replace(state, checkpoint=path, checkpoint_step=step)
            case PauseLearned():
                return replace(state, longest_pause=event.seconds)
            case JobStarted() if self.job != event.job:
                # The figures of the folder's earlier job do not apply to a new job.
                return replace(state, job=event.job, longest_pause=None, earlier_seconds=0.0)
        return state

    def about(self) -> dict[str, Json]:
        """Return the state and the attempt's record in one object, for commands."""
        content: dict[str, Json] = as_json(replace(self, attempt=None))
        if self.attempt is None:
            return content
        record = self.attempt.as_json()
        attempt = {"attempt": self.attempt.number, "attempt_pid": self.attempt.pid}
        return {**record, **content, **attempt, "step": self.attempt.step}

    @property
    def device(self) -> str | None:
        """The device of the attempt."""
        return None if self.attempt is None else self.attempt.spec.device

    @property
    def importance(self) -> tuple[object, ...]:
        """The fields that are written immediately when they change."""
        attempt = self.attempt
        if attempt is None:
            return self.id, self.state, self.checkpoint
        return self.id, self.state, self.checkpoint, attempt.number, attempt.pid, attempt.sizes


def read_state(run_dir: Path) -> RunState | None:
    """Return the state that a run folder holds, or None if it cannot be read."""
    try:
        return RunState.read(read_small(run_dir / STATE_FILE, _MAX_BYTES)[0])
    except OSError:
        return None


class StateFile:
    """Keeps ``state.json`` up to date, with at most one write per second for unimportant changes.

    If the disk is full, the job continues without the file.

    Args:
        run_dir: the run folder.
        state: the first state.
        check: called before each write. If it raises RunFolderLostError, because another job has
            taken the folder, nothing is written.
    """

    def __init__(
        self, run_dir: Path, state: RunState, check: Callable[[], None] = lambda: None
    ) -> None:
        self.state = state
        self._check = check
        self._path = run_dir / STATE_FILE
        self._is_due = True
        self._next_write = 0.0
        self._has_warned = False
        # For an attempt in this process, another thread ticks while the main thread sends events.
        self._lock = threading.RLock()

    def update(self, change: Callable[[RunState], RunState]) -> None:
        """Change the state, and write it if the change is important or the last write is old."""
        with self._lock:
            before = self.state
            state = change(self.state)
            if state == before:
                return
            if state.state != before.state:
                state = replace(state, since=time.time())
            self.state = state
            self._is_due = True
            if state.importance != before.importance:
                self._next_write = 0.0
        self.write_if_due()

    def write_if_due(self) -> None:
        """Write a changed state, unless the last write was less than a second ago."""
        with self._lock:
            now = time.monotonic()
            if not self._is_due or now < self._next_write:
                return
            self._is_due = False
            self._next_write = now + _INTERVAL_SECONDS
            content = as_json(replace(self.state, updated=time.time()))
            try:
                self._check()
                write_json(self._path, content)
            except RunFolderLostError:
                return
            except OSError as error:
                self._is_due = True
                if not self._has_warned:
                    self._has_warned = True
                    text = "cannot write %s: %s; the job continues"
                    log.warning(text, self._path, error.strerror)


SUMMARY_FILE = "summary.json"
_NOT_IN_FILE = ("run_dir", "earlier_seconds", "error")


@dataclass(frozen=True)
class Summary:
    """The result of a job: what ``launch`` returns and ``summary.json`` records.

    Attributes:
        status: `completed`, `failed`, `no_device`, `interrupted` or `pruned`.
        run_dir: the run folder.
        reason: one sentence. A completed job has a reason only if its success is in doubt.
        result: the trainer's return value, in JSON's types.
        wall_seconds: the time from the launcher's start of the job to its end.
        wait_seconds: the part of that time in which the job waited for a GPU.
        goodput: the seconds of all launches by their use, and the useful `share`.
        checkpoint: the last checkpoint that a trainer reported.
        best: the best checkpoint that a trainer kept. In the file only if it exists.
        environment: the short form of `environment.json`.
        advice: sentences about ways to make the job faster.
        attempts: the attempts of this launch, in order.
        earlier_seconds: the duration of the job's earlier launches. Not in the file.
        error: the trainer's own exception. Not in the file.
    """

    status: str
    run_dir: Path = Path()
    reason: str | None = None
    result: Any = None
    wall_seconds: float | None = None
    wait_seconds: float | None = None
    goodput: Mapping[str, float] | None = None
    checkpoint: Path | None = None
    best: Mapping[str, Json] | None = None
    environment: Mapping[str, Json] | None = None
    advice: tuple[str, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    earlier_seconds: float = 0.0
    error: BaseException | None = None

    def __repr__(self) -> str:
        what = "result" if self.reason is None else "reason"
        end = shorten(f"{what}={getattr(self, what)!r}", 200)
        attempts = counted(len(self.attempts), "attempt")
        wall = "" if self.wall_seconds is None else f" in {duration(self.wall_seconds)}"
        return f"Summary({self.status}, {end}, {attempts}{wall}, run_dir={str(self.run_dir)!r})"

    def _repr_html_(self) -> str:
        """Return the summary as HTML for notebooks, with a link to the job's page."""
        page = (self.run_dir / "report.html").absolute().as_uri()
        return f'<code>{escape(repr(self))}</code> <a href="{escape(page)}">report</a>'

    def raise_unless_completed(self) -> None:
        """Raise the error that ended the job, unless it completed or its sweep pruned it.

        Raises:
            NoDeviceError: no device became free in time, and the CPU is not allowed.
            AttemptsExhaustedError: memory ran out on every device that may be used.
            TrainerFailedError: the trainer failed for another reason. If this process knows the
                class of the trainer's exception, that exception is raised instead.
        """
        reason = str(self.reason)
        if self.status in ("completed", "pruned"):
            return
        if self.status == "no_device" or not self.attempts:
            raise NoDeviceError(reason)
        last = self.attempts[-1]
        if last.kind in MEMORY_FAILURES:
            raise AttemptsExhaustedError(reason)
        text = last.traceback or reason
        # The stack of a crash does not name the signal that ended the process.
        if reason not in text:
            text = f"{reason}\n{text}"
        error = self.error
        if error is None:
            error = TrainerFailedError(text)
        raise error from TrainerFailedError(text)

    @property
    def objective(self) -> Any:
        """The value that a sweeper optimises."""
        return objective_of(self.result)

    def as_json(self) -> dict[str, Json]:
        """Return the content of ``summary.json``."""
        fields = {
            name: as_json(value) for name, value in vars(self).items() if name not in _NOT_IN_FILE
        }
        for name in ("wall_seconds", "wait_seconds"):
            if fields[name] is not None:
                fields[name] = round(fields[name], 3)
        fields["checkpoint"] = None if self.checkpoint is None else str(self.checkpoint)
        fields |= lacked_by_json(self.result)
        if self.best is None:
            del fields["best"]
        content: dict[str, Json] = strict_json({"schema": SCHEMA, **fields})
        return content

    def write(self) -> None:
        """Write ``summary.json``, completely or not at all. If the disk is full, log a warning."""
        path = self.run_dir / SUMMARY_FILE
        try:
            # The file exists before it is flushed, because a scheduler may kill this process while
            # it waits for the disk.
            write_json(path, self.as_json(), indent=2)
            sync(path)
            sync(path.parent)
        except OSError as error:
            log.warning("cannot write %s: %s", path, error.strerror)


# The run folder of the current job of a sweep, if the job ended in an earlier launch.
_ended_earlier: list[Path] = []


def note_ended_earlier(folder: Path | None) -> None:
    """Record that a sweep's job ended in an earlier launch, since Hydra calls it again anyway.

    Args:
        folder: the job's run folder, None for a job that has to run.
    """
    _ended_earlier[:] = [] if folder is None else [folder]


def summary_of_earlier_launch() -> Summary | None:
    """Return the summary of the job of `note_ended_earlier`, or None."""
    return read_summary(_ended_earlier[0]) if _ended_earlier else None


def read_summary(folder: Path) -> Summary | None:
    """Return the summary in a run folder, or None if it cannot be read.

    The attempts of a file that another version wrote may be missing.
    """
    try:
        text = (folder / SUMMARY_FILE).read_text(encoding="utf-8", errors="replace")
        content = json.loads(text)
        attempts = content.pop("attempts", ()) if isinstance(content, dict) else ()
        content = with_lacked_by_json(content)
        summary = replace(from_json(Summary, content), run_dir=folder)
    except (OSError, ValueError, RecursionError):
        return None
    try:
        return replace(summary, attempts=tuple(Attempt.parse(attempt) for attempt in attempts))
    except (ValueError, TypeError, AttributeError):
        return summary


def objective_of(result: Any) -> Any:
    """Return the value that a sweeper optimises: a result's ``objective``, or the whole result."""
    return result.get("objective", result) if isinstance(result, dict) else result


def figure_of(result: Any) -> str | None:
    """Return the name of the figure that equals a result's objective, None unless it is unique."""
    if not isinstance(result, dict) or "objective" not in result:
        return None
    names = [n for n, value in result.items() if n != "objective" and value == result["objective"]]
    return names[0] if len(names) == 1 else None


_LACKED = "not_finite"
_LACKED_WITHIN = "not_finite_within"
_Place = tuple[str | int, ...]


def lacked_by_json(result: Any) -> dict[str, Json]:
    """Return entries for ``summary.json`` that keep the NaN and infinities of a result.

    JSON has no such values, so the file has null in their place. The entries hold the objective,
    and the place and value of each such figure in a dictionary or list.
    """
    lacked: dict[str, Json] = {}
    objective = objective_of(result)
    if isinstance(objective, float) and not math.isfinite(objective):
        lacked[_LACKED] = str(float(objective))
    within = [
        {"at": list(place), "value": value} for place, value in _not_finite(result, ()) if place
    ]
    if within:
        lacked[_LACKED_WITHIN] = within
    return lacked


def _not_finite(value: Any, place: _Place) -> Iterator[tuple[_Place, str]]:
    if isinstance(value, float) and not math.isfinite(value):
        yield place, str(float(value))
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        yield from _not_finite(item, (*place, key))


def with_lacked_by_json(content: Any) -> Any:
    """Return the content of a file with NaN and infinities restored in its result.

    Raises:
        ValueError: `lacked_by_json` does not write such an entry.
    """
    if not isinstance(content, dict):
        return content
    result: Any = copy.deepcopy(content.get("result"))
    with contextlib.suppress(LookupError, TypeError):
        for entry in content.get(_LACKED_WITHIN) or ():
            *parents, last = entry["at"]
            holder: Any = result
            for key in parents:
                holder = holder[key]
            holder[last] = float(entry["value"])
    if content.get(_LACKED) is not None:
        objective = float(content[_LACKED])
        if isinstance(result, dict):
            result["objective"] = objective
        else:
            result = objective
    return {**content, "result": result} if "result" in content else content
